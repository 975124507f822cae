"""What a preview costs: its own time, and that of the batches of the stream beside which it runs.

    python -m benchmarks preview --rounds 2 --out benchmarks/results/preview.json

A stream reads 100,000 records, and then 2,000 records a second. In each round it is left alone for 20 s, then
`recourse preview` replays everything since its start with the same code, at its own priority, and finds no difference.
The figures are medians of whole batches (StreamingQueryProgress, triggerExecution) of all rounds, and of the command; a
preview replays the records that came meanwhile too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from benchmarks.feeds import LiveFeed, create_topic, feed_backlog
from benchmarks.place import Workshop, workshop
from benchmarks.processes import run_command
from benchmarks.run import Report, median
from benchmarks.speed import flows
from benchmarks.speed.records import RATE, generate


def run(
    report: Report,
    *,
    rounds: int = 2,
    records: int = 100_000,
    alone: Annotated[float, "seconds of a window without a preview"] = 20.0,
    longest: Annotated[float, "seconds that a preview may take"] = 120.0,
) -> None:
    with workshop() as shop:
        create_topic(shop.place.bootstrap, flows.TOPIC)
        feed_backlog(shop.place.bootstrap, flows.TOPIC, generate(records, seed=1))
        shop.finish(shop.start(flows.stateless), seconds=300)
        quietly = [_preview(shop, longest) for _ in range(rounds)]
        count = int((rounds * (alone + longest) + alone) * RATE)
        live = generate(count, seed=2, began_ms=time.time() * 1000 + 3000)
        feed = LiveFeed(shop.place.bootstrap, flows.TOPIC, live)
        started = shop.start(flows.stateless, trigger="continuous")
        feed.start()
        beside: list[float] = []

        def preview() -> None:
            beside.append(_preview(shop, longest, lambda: started.look(shop.spark)))

        try:
            shop.wait(started, alone)
            batches = shop.beside(started, {"none": lambda: shop.wait(started, alone), "preview": preview}, rounds)
        finally:
            feed.stop()
            shop.finish(started, seconds=60, stop=True)
    runs = {f"of {records:,} records, no stream beside it": quietly, "beside a stream, of what it has read": beside}
    report.table("runs", [{"preview": name, "s": median(seconds)} for name, seconds in runs.items()])
    report.table("batches", batches)


def _preview(shop: Workshop, longest: float, look: Callable[[], object] = bool) -> float:
    """Seconds of the command; `look` is called meanwhile."""
    recourse = str(Path(sys.executable).with_name("recourse"))
    command = [recourse, "preview", "stateless", "--last", "1 hour", "--no-suites"]
    environment = shop.place.environment(["benchmarks.speed.flows"])
    return run_command(command, environment, shop.place.folder / "preview.log", longest, look)
