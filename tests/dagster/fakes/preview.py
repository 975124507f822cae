"""A command in the place of `recourse preview`: what it writes, and how it ends, is the name of the stream."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> int:
    """End as the stream's name says."""
    arguments = sys.argv[1:]
    how, out = arguments[-1], Path(arguments[arguments.index("--json") + 1])
    assert arguments[-2] == "--"
    if how == "usage":
        print("REC-001 stream usage has never run\n  next: there is nothing to compare with", file=sys.stderr)
        return 2
    if how == "slow":
        (Path(os.environ["RECOURSE_HOME"]) / "pid").write_text(str(os.getpid()))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
        time.sleep(60)
    code = {"equal": 0, "different": 10}.get(how, 1)
    table = {"table": "orders", "published_rows": 9, "rebuilt_rows": 9, "corrected": code, "new": 0, "gone": 0}
    value = {
        "verdict": how,
        "stream": how,
        "reasons": [f"{how} it is"] if code == 1 else [],
        "code": {"hash": "b", "package": "1"},
        "published_code": [{"hash": "a", "package": "1"}],
        "savepoint": None,
        "records": 100,
        "tables": [table],
        "seconds": {"in all": 1.5},
        "report": str(out.with_name("report.html")),
    }
    out.write_text(json.dumps(value))
    print(f"stream {how}: {how}", " ".join(arguments[:-4]))
    return code


if __name__ == "__main__":
    sys.exit(main())
