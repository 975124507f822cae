"""A recovery beside its running stream: how long readers wait for fresh rows, and what it costs the stream.

    python -m benchmarks recovery --records 1000000 --rate 2000

The stream `inventory` (totals by product, an upsert) has read the records with a wrong function, and reads on at the
rate while the corrected function is deployed and a recovery from the very start is applied. A reader looks at the
published table every 100 ms. `gap_s` is the longest time for which it saw no further records, `p50_ms` and `during_ms`
the medians of the stream's batches before the recovery and while the replay followed. At the end the table has to equal
the truth.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from benchmarks.processes import Child
from benchmarks.run import Report, median, progress, verdict, wait_until
from orchestration.cli.demo import RIGHT, WRONG, Story
from reprocessing.plan.journal import journal_of
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.state.status import read_status

_STREAM = "inventory"
_TICK = 0.1
_FED_EVERY = 0.25
_LONGEST = 400.0
"""Seconds of live records that are made beforehand: the bound of the whole run."""


def run(
    report: Report,
    *,
    records: Annotated[int, "records that the wrong code has read"] = 1_000_000,
    rate: Annotated[int, "records per second that arrive meanwhile"] = 2_000,
    before: Annotated[float, "seconds of live batches before the recovery"] = 30.0,
    most_gap: Annotated[float, "seconds of the longest gap that is good"] = 5.0,
) -> None:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as home:
        settings = Settings.load({"home": Path(home)})
        with Broker(settings) as broker:
            story = Story(Path(home), settings, broker.start(), records + int(rate * _LONGEST))
            report.table("recovery", [_measured(story, records, rate, before, most_gap)])


def _measured(story: Story, records: int, rate: int, before: float, most_gap: float) -> dict[str, object]:
    story.begin()
    story.deploy(WRONG)
    progress(f"{records:,} records are sent")
    story.feed(story.all[:records])
    live = _Live(story, records, rate)
    session = Child(
        [sys.executable, "-m", "orchestration.cli", "streams", "run", *story.streams, "--trigger", "continuous"],
        story.environment(),
        story.folder / "session.log",
        by_signal=True,
    )
    try:
        wait_until(lambda: _seen(story) == records, 600, "the records", check=session.check)
        with live.running():
            time.sleep(10)
            batches = len(live.batches)
            time.sleep(before)
            quiet = live.batch_ms(batches)
            story.deploy(RIGHT)
            plan = story.plan_of(_STREAM, "--to-earliest", show=False)
            at, batches, gaps = time.monotonic(), len(live.batches), len(live.gaps)
            story.recourse("recover", "apply", plan, "--yes")
            published = time.monotonic() - at
            wait_until(lambda: _batches(story, 2) > 0, 60, "a batch of the new generation", check=session.check)
            time.sleep(5)
            gap = max(live.gaps[gaps:])
        wait_until(lambda: _seen(story) == live.sent, 120, "the rest", check=session.check)
    finally:
        session.stop()
    lines = {(line.stage, line.state): line.at for line in journal_of(story.settings, plan).lines()}
    followed = lines["compare", "done"] - lines["prepare", "done"]
    story.compare(live.sent, right=True)
    return {
        "records": records,
        "rate": rate,
        "published_s": published,
        "followed_s": followed,
        "replayed_per_s": records / followed,
        "stopped_s": lines["clean_up", "done"] - lines["take_savepoint", "begun"],
        "gap_s": gap,
        "p50_ms": quiet,
        "during_ms": live.batch_ms(batches, published),
        "verdict": verdict(gap <= most_gap),
    }


class _Live:
    """Records that keep arriving, and what a reader of the table and of the status sees meanwhile."""

    def __init__(self, story: Story, sent: int, rate: int) -> None:
        self.story, self.sent, self.rate = story, sent, rate
        self.gaps: list[float] = []
        self.batches: list[tuple[float, int]] = []
        """The time at which each batch was seen first, and its milliseconds."""
        self._over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=work, daemon=True) for work in (self._feed, self._read)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def batch_ms(self, since: int, within: float = float("inf")) -> float:
        return median([ms for at, ms in self.batches[since:] if at - self.batches[since][0] <= within])

    def _feed(self) -> None:
        due, step = time.monotonic(), int(self.rate * _FED_EVERY)
        while not self._over.wait(max(due - time.monotonic(), 0.0)) and self.sent + step <= len(self.story.all):
            self.story.feed(self.story.all[self.sent : self.sent + step])
            self.sent += step
            due += _FED_EVERY

    def _read(self) -> None:
        seen, since, last = _seen(self.story), time.monotonic(), -1
        while not self._over.wait(_TICK):
            if (now := _seen(self.story)) != seen:
                self.gaps.append(time.monotonic() - since)
                seen, since = now, time.monotonic()
            status = read_status(self.story.settings, _STREAM)
            if status is not None and status.batch not in (None, last) and status.batch_ms is not None:
                last = status.batch
                self.batches.append((time.monotonic(), status.batch_ms))


def _batches(story: Story, generation: int) -> int:
    """The batches of the session, if it is in this generation."""
    status = read_status(story.settings, _STREAM)
    return status.batches if status is not None and status.generation == generation else 0


def _seen(story: Story) -> int:
    """The records of the published table."""
    if not (story.settings.tables_folder / _STREAM / "_delta_log").is_dir():
        return 0
    return sum(int(row["movements"]) for row in story.rows(_STREAM))
