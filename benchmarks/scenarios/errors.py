"""How long a batch takes with a record on which the stream's function raises, beside a batch without one.

    python -m benchmarks errors --streams division,python_udf --out benchmarks/results/errors.json

Each stream of `benchmarks/speed/error_flows.py` reads a backlog in batches of 10,000 records; after a warm-up every
third batch has a record that raises. Times are medians of those from one commit of the table to the next. Exit code 1:
a batch with such a record took 3 times as long as one without, or more, or something else than these records was set
aside.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated

from benchmarks.feeds import feed_values
from benchmarks.place import Workshop, workshop
from benchmarks.run import Report, Row, median, progress, verdict
from benchmarks.speed import error_flows
from streaming_jobs.stream import Stream

GOAL = 3.0
RECORDS, EVERY = 10_000, 3


def run(
    report: Report,
    *,
    batches: Annotated[int, "after the warm-up"] = 15,
    warm_up: Annotated[int, "batches before"] = 9,
    streams: Annotated[tuple[str, ...], "which ones; all if left out"] = (),
) -> None:
    known = {each.name: each for each in error_flows.STREAMS}
    chosen = [known[name] for name in streams or known]
    with workshop({"stream.max_offsets_per_trigger": RECORDS}) as at_work:
        feed_values(at_work.place.bootstrap, error_flows.RECORDS.name, _values(warm_up, batches))
        report.table("figures", [_measured(at_work, each, warm_up, batches) for each in chosen])


def _raises_in(batch: int, warm_up: int) -> bool:
    return batch == 1 or (batch >= warm_up and batch % EVERY == 0)  # the first one warms the search up


def _values(warm_up: int, batches: int) -> Iterator[bytes]:
    for batch in range(warm_up + batches):
        bad = RECORDS * 2 // 3 if _raises_in(batch, warm_up) else -1
        for number in range(RECORDS):
            value = {"n": batch * RECORDS + number, "bad": int(number == bad), "k": f"key {number % 500}"}
            yield json.dumps(value).encode()


def _measured(at_work: Workshop, stream: Stream, warm_up: int, batches: int) -> Row:
    found = at_work.batches(stream)
    took = {entry.batch: ms for entry, ms in found}
    letters = {entry.batch: entry.dead_letters for entry, _ in found}
    right = letters == {batch: int(_raises_in(batch, warm_up)) for batch in range(1, warm_up + batches)}
    plain = median([ms for b, ms in took.items() if b >= warm_up and not _raises_in(b, warm_up)])
    raising = median([ms for b, ms in took.items() if b >= warm_up and _raises_in(b, warm_up)])
    ratio = raising / plain if plain else float("inf")
    progress(f"{stream.name}: {ratio:.1f}")
    return {
        "stream": stream.name,
        "batch ms": plain,
        "with a record that raises, ms": raising,
        "times": ratio,
        "verdict": verdict(right and ratio < GOAL),
    }
