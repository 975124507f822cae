"""A recovery beside its running stream: how long readers wait for fresh rows, and what it costs the stream.

    python -m benchmarks recovery --records 1000000 --rate 2000

The stream `inventory` (totals by product, an upsert) has read the records with a wrong function, and reads on at the
rate while the corrected function is deployed and a recovery from the very start is applied. A reader looks at the
published table every 100 ms. `gap_s` is the longest time for which it saw no further records, `p50_ms` and `during_ms`
the medians of the stream's batches before the recovery and while the replay followed. At the end the table has to equal
the truth.
"""

from __future__ import annotations

import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from benchmarks.run import Report, median, progress, verdict, wait_until
from orchestration.cli.demo import RIGHT, WRONG, Story
from orchestration.cli.live import Freshness
from reprocessing.plan.journal import journal_of
from streaming_jobs.examples.stock.movements import Movement, movements
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings
from streaming_jobs.state.status import read_status

_STREAM = "inventory"
_LONGEST = 400.0
"""Seconds of live records that are made beforehand: the bound of the whole run."""


def run(
    report: Report,
    *,
    records: Annotated[int, "records that the wrong code has read"] = 1_000_000,
    rate: Annotated[int, "records per second that arrive meanwhile"] = 2_000,
    products: Annotated[int, "rows of the table, and of the state"] = 200,
    before: Annotated[float, "seconds of live batches before the recovery"] = 30.0,
    most_gap: Annotated[float, "seconds of the longest gap that is good"] = 5.0,
) -> None:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as home:
        settings = Settings.load({"home": Path(home)})
        with Broker(settings) as broker:
            story = Story(Path(home), settings, broker.start(), 0)
            story.all = many_movements(records + int(rate * _LONGEST), products)
            report.table("recovery", [_measured(story, records, rate, before, most_gap)])


def _measured(story: Story, records: int, rate: int, before: float, most_gap: float) -> dict[str, object]:
    story.begin()
    story.deploy(WRONG)
    progress(f"{records:,} records are sent")
    story.feed(story.all[:records])
    batches = _Batches(story.settings)
    live = story.live(records, rate, looked=batches.look)
    with story.session() as check:
        wait_until(lambda: story.counted() == records, 600, "the records", check=check)
        with live.running():
            time.sleep(10)
            first = len(batches.seen)
            time.sleep(before)
            quiet = batches.ms(first)
            story.deploy(RIGHT)
            plan = story.plan_of(_STREAM, "--to-earliest", show=False)
            at, first = time.time(), len(batches.seen)
            story.recourse("recover", "apply", plan, "--yes")
            published = time.time() - at
            wait_until(lambda: story.runs_in(2, batches=1), 60, "a batch of the new generation", check=check)
            time.sleep(5)
        wait_until(lambda: story.counted() == live.sent, 120, "the rest", check=check)
    gap = Freshness(live.looks).largest_gap(at)
    lines = {(line.stage, line.state): line.at for line in journal_of(story.settings, plan).lines()}
    followed = lines["compare", "done"] - lines["prepare", "done"]
    story.compare(live.sent, right=True)
    return {
        "records": records,
        "rate": rate,
        "rows": len(story.rows(_STREAM)),
        "published_s": published,
        "followed_s": followed,
        "replayed_per_s": records / followed,
        "stopped_s": lines["clean_up", "done"] - lines["take_savepoint", "begun"],
        "gap_s": gap,
        "p50_ms": quiet,
        "during_ms": batches.ms(first, published),
        "verdict": verdict(gap <= most_gap),
    }


def many_movements(count: int, products: int) -> list[Movement]:
    """Movements so close that those of millions lie in the past, as a broker demands of its records."""
    return movements(count, products=products, apart=timedelta(seconds=1))


class _Batches:
    """The batches of the stream as its status shows them: when each was seen first, and its milliseconds."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.seen: list[tuple[float, int]] = []
        self._last = -1

    def look(self) -> None:
        status = read_status(self._settings, _STREAM)
        if status is not None and status.batch not in (None, self._last) and status.batch_ms is not None:
            self._last = status.batch
            self.seen.append((time.time(), status.batch_ms))

    def ms(self, first: int, within: float = float("inf")) -> float:
        """The median of the batches from one on, that were seen within some seconds of it."""
        return median([ms for at, ms in self.seen[first:] if at - self.seen[first][0] <= within])
