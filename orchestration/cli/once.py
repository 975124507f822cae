"""`recourse up --once`: feed, run the streams to the end of their topics, compare every table with the truth."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from orchestration.cli import FAILED
from orchestration.cli.children import end, session_driver
from orchestration.cli.feed import feed_with_bar, summary
from orchestration.cli.invocation import Invocation, environment_name
from orchestration.cli.output import Output, number, print_json, print_table, say
from orchestration.sessions.bounded_log import BoundedLog
from streaming_jobs.errors import RecourseError, UsageError

if TYPE_CHECKING:
    from streaming_jobs.examples.flights.truth import TableCheck
    from streaming_jobs.settings import Settings

TRUTH_OF = "streaming_jobs.examples.flights.streams"
"""The module whose streams can be compared with the truth of the flights."""
BATCH = 40_000
"""Records per batch, unless the setting names another number."""


def run_once(call: Invocation, *, share: float, output: Output) -> int:
    """Feed unless the topic is complete, process, compare; returns the exit code. The broker has to run."""
    from streaming_jobs.examples.flights.truth import STREAMS, compare

    if TRUTH_OF not in call.settings.flows:
        raise UsageError(
            f"--once compares the streams of {TRUTH_OF} with the truth, and they are not among your flows",
            f"leave --once out, or add {TRUTH_OF} to the setting `flows`",
        )
    begun = time.monotonic()
    feed_once(call.settings, share)
    process(call, [stream.name for stream in STREAMS])
    say("comparing the tables with the truth")
    checks = compare(call.settings, share)
    seconds = time.monotonic() - begun
    ok = all(check.ok for check in checks)
    if output is Output.json:
        print_json({"ok": ok, "seconds": round(seconds, 1), "share": share, "tables": [as_json(c) for c in checks]})
    else:
        print_table(["table", "expected", "found", "verdict", "detail"], rows(checks), right=["expected", "found"])
        say(f"{'every table equals the truth' if ok else 'the tables are wrong'}; {seconds:.0f} s")
    return 0 if ok else FAILED


def feed_once(settings: Settings, share: float) -> None:
    """Bring the topic to exactly the first `share` of the flights; raises UsageError if it holds more than that."""
    from streaming_jobs.examples.flights.dataset import TOTAL
    from streaming_jobs.examples.flights.feeder import survey

    there = survey(settings, share)
    if there.records > there.total:
        way = "use another home: recourse --set home=FOLDER up --once"
        if there.records <= TOTAL:
            way = f"ask for as much, with --share {share_of(there.records, TOTAL)}, or {way}"
        raise UsageError(
            f"the topic holds {there.records:,} records, and --share {share:g} is {there.total:,} flights: the tables"
            " would differ from the truth",
            way,
        )
    if there.complete:
        say(f"the topic has these {number(there.total)} flights already; nothing is sent")
        return
    report = feed_with_bar(settings, rate=None, share=share)
    say(summary(report))
    if report.stopped:
        raise KeyboardInterrupt


def process(call: Invocation, streams: list[str]) -> None:
    """Run the streams in one session until they have read everything; raises RecourseError if it fails."""
    from orchestration.cli.catching_up import Bars, catching_up
    from orchestration.cli.observed import observe_all

    settings = call.settings
    log = BoundedLog(settings.logs / "session-once.log")
    driver = session_driver(streams, {**_smaller_batches(call), **call.environment()}, log, trigger="available-now")
    ahead = catching_up(settings, call.topology.select(streams))
    with Bars() as bars:
        try:
            driver.start()
            bars.show(ahead.look(time.monotonic()))
            while (code := driver.wait(0.5)) is None:
                bars.show(ahead.look(time.monotonic()))
                log.trim()
            bars.show(ahead.look(time.monotonic()), last=True)
        finally:
            end(driver, max(settings.for_stream(s).stop_deadline.total_seconds() for s in streams) + 15)
    if code != 0:
        errors = [note for seen in observe_all(settings, streams) for note in seen.notes()]
        raise SessionFailed(
            "\n  ".join([f"the session ended with exit code {code}", *errors]), f"its log is {log.path}"
        )


def _smaller_batches(call: Invocation) -> dict[str, str]:
    """The environment for batches small enough to show progress: the default puts nearly all flights into one."""
    key = "stream.max_offsets_per_trigger"
    set_by_user = any(origin.key == key and origin.origin != "default" for origin in call.loaded.origins)
    return {} if set_by_user else {environment_name(key): str(BATCH)}


class SessionFailed(RecourseError):
    """The session of `recourse up --once` did not get to the end of its topics.

    The lines before it say which stream failed and why. Correct that, and run the command again: it continues there.
    """

    code = "REC-033"


def share_of(records: int, total: int) -> str:
    """The share with the fewest digits that gives exactly this number of records."""
    from streaming_jobs.examples.flights.dataset import flights_in

    for digits in range(1, 12):
        # Rounded up, as a share is rounded down to whole records.
        share = min(math.ceil(records / total * 10**digits) / 10**digits, 1.0)
        if flights_in(share) == records:
            break
    return f"{share:.{digits}f}"


def rows(checks: list[TableCheck]) -> list[list[str]]:
    """The verdicts as table rows."""
    return [
        [c.table, number(c.expected_rows), number(c.found_rows), "ok" if c.ok else "wrong", c.detail] for c in checks
    ]


def as_json(check: TableCheck) -> dict[str, Any]:
    """One verdict with stable keys."""
    return {
        "table": check.table,
        "ok": check.ok,
        "expected_rows": check.expected_rows,
        "found_rows": check.found_rows,
        "detail": check.detail,
    }
