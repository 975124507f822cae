"""The fork server for the commands of tests: `python -m tests.support.warm_python EXECUTABLE DESCRIPTOR`.

As `streaming_jobs/platform/processes/fork_server.py`, whose processes are Spark's. These are `recourse` too, with its
imports already done; what a command starts as its Python is forked here as well.
"""

from __future__ import annotations

import os
import sys

from streaming_jobs.platform.processes import fork_server

COMMAND = "orchestration.cli.__main__"
_OF_COMMANDS = (
    COMMAND,
    "orchestration.cli.app",
    "orchestration.cli.recover",
    "orchestration.cli.streams",
    "orchestration.cli.verify",
    "reprocessing.executor",
    "reprocessing.plan.planner",
    "streaming_jobs.runtime.query_builder",
    "streaming_jobs.session",
    "streaming_jobs.verification.verifier",
)


def main() -> None:
    fork_server._IMPORTED += _OF_COMMANDS  # type: ignore[assignment]
    # A command has another hash seed than Spark's processes, and no bytecode: nothing that is tested here differs.
    fork_server._APPLIED += ("PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED")  # type: ignore[assignment]
    fork_server._OURS = fork_server._of_a_start(os.environ)
    fork_server._ONE_THREAD["_RJEM_MALLOC_CONF"] = "background_thread:false"  # delta-rs
    sys.dont_write_bytecode = True  # a test changes a module more than once in a second
    sys.executable = sys.argv[1]
    fork_server.main()


if __name__ == "__main__":
    main()
