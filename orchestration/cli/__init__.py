"""The command line: one module per group of commands. Read `app.py` first.

Rules that hold for every command:
- data is printed on stdout, messages and progress on stderr; `-o json` prints one JSON document with stable keys;
- exit code 0 is ok, 1 failed, 2 a usage error, 3 our own bug, 130 interrupted;
- heavy modules (Spark, Kafka, Dagster, pandas) are imported inside the command that needs them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestration.cli.text import BUG, FAILED, INTERRUPTED, USAGE
from streaming_jobs.errors import RecourseError, UsageError, setup_error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    from typer.main import get_command

    from orchestration.cli.app import app
    from streaming_jobs.platform import entry, extras

    try:
        entry.check()
        get_command(app).main(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="recourse")
        return 0  # not reached: typer ends with SystemExit
    except SystemExit as end:
        return _flushed(end.code if isinstance(end.code, int) else int(end.code is not None))
    except KeyboardInterrupt:
        return _flushed(INTERRUPTED)
    except RecourseError as error:
        _say(str(error))
        return _flushed(USAGE if isinstance(error, UsageError) else FAILED)
    except OSError as error:
        if (known := setup_error(error)) is None:
            return _bug(error)
        _say(str(known))
        return _flushed(FAILED)
    except ImportError as error:
        if (missing := extras.missing(error, "this command")) is None:
            return _bug(error)
        _say(str(missing))
        return _flushed(FAILED)
    except Exception as error:  # noqa: BLE001 - the outermost handler; the traceback is written to a file
        return _bug(error)


def _bug(error: Exception) -> int:
    kind = type(error).__name__
    _say(f"REC-000 this is a bug in recourse ({kind}); the traceback is in {write_traceback(error)}")
    return _flushed(BUG)


def write_traceback(error: BaseException) -> Path:
    """Write the traceback of an unexpected exception, readable by its owner alone, and return the file's path.

    Arguments are left out: a secret may have been given with --set.
    """
    import tempfile
    import time
    import traceback

    text = [f"python {sys.version}\n", f"at {time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n\n"]
    text += traceback.format_exception(error)
    descriptor, name = tempfile.mkstemp(prefix="recourse-bug-", suffix=".txt")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.writelines(text)
    return Path(name)


def _say(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr)


def _flushed(code: int) -> int:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        # The reader is gone (`recourse ... | head`): the interpreter must not report that at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
