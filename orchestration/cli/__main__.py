"""`python -m orchestration.cli` is `recourse`."""

import sys

from orchestration.cli import main

if __name__ == "__main__":
    sys.exit(main())
