"""A driver as the supervisor sees one: takes leases, writes status files, stops on SIGTERM or end of input.

It counts a batch each 50 ms. A file `<home>/exit` with a number makes it end with that exit code (78 with a
failed stream), one `<home>/deaf` makes it ignore SIGTERM, one `<home>/one_fails` fails its first stream only.
Every start appends its arguments to `<home>/starts`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time

from streaming_jobs import session
from streaming_jobs.errors import LeaseBusy, RecourseError
from streaming_jobs.runtime.session_options import log_to_stderr
from streaming_jobs.settings import Settings
from streaming_jobs.state.lease import acquire
from streaming_jobs.state.status import Status, write_status


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams")
    parser.add_argument("--supervised", action="store_true")
    parser.add_argument("--respect-stop", action="store_true")
    parser.add_argument("--asked-at", type=float)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--trigger")
    options = parser.parse_args()
    try:
        settings = Settings.load(dict(text.split("=", 1) for text in options.set))
    except RecourseError as error:
        log_to_stderr()
        session.log.error("session failed", code=error.code, found=error.found, next=error.next_step)
        return error.exit_code
    home = settings.home.absolute()
    run_id = os.environ.get("RECOURSE_RUN_ID")
    with (home / "starts").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "arguments": sys.argv[1:], "run": run_id}) + "\n")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: None if (home / "deaf").exists() else stop.set())
    if options.supervised:
        threading.Thread(target=_watch, args=(stop,), daemon=True).start()
    names = options.streams.split(",")
    try:
        leases = [acquire(settings, name, purpose="session", wait=2.0) for name in names]
    except LeaseBusy as error:
        print(error, file=sys.stderr)
        return error.exit_code
    statuses = [Status(name, pid=os.getpid(), run_id=run_id, started_at=time.time()) for name in names]
    print("fake driver at work", file=sys.stderr, flush=True)
    batch = 0
    while not stop.is_set():
        for status in statuses:
            status.heartbeat = status.committed_at = time.time()
            status.state, status.batch, status.lag_records, status.rows_written = "running", batch, 7, batch * 10
            status.progress_at = status.lag_at = time.time()
            status.input_rows_per_s, status.watermark = 1.5, "2013-01-01T00:00:00Z"
        if (home / "one_fails").exists():
            _fail(statuses[0])
        exit_file = home / "exit"
        if exit_file.exists() and (text := exit_file.read_text()):
            if text == "78":
                _fail(statuses[0])
            _write(settings, statuses)
            return int(text)
        _write(settings, statuses)
        batch += 1
        time.sleep(0.05)
    for status in statuses:
        status.state = "stopped" if status.state != "failed" else "failed"
    _write(settings, statuses)
    print("stopped at a batch border", file=sys.stderr, flush=True)
    for lease in leases:
        lease.release()
    return 0


def _fail(status: Status) -> None:
    status.state, status.error = "failed", {"code": "REC-021", "found": "wrong table", "next": "look"}


def _write(settings: Settings, statuses: list[Status]) -> None:
    for status in statuses:
        write_status(settings, status)


def _watch(stop: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    stop.set()


if __name__ == "__main__":
    sys.exit(main())
