"""What an archive costs the stream beside it, and how quickly a backlog is read from it.

    python -m benchmarks archive --rounds 4 --seconds 20 --out benchmarks/results/archive.json

Live: flights arrive at a steady rate, and `flights_clean` reads them all the time. The archive of the topic runs in the
same session in two windows of three, with two triggers; ms are of whole batches of `flights_clean` (triggerExecution).
Backlog: the same stream reads the whole topic from Kafka, then, when Kafka
has deleted it, from the archive; records per second are of all its batches but the first, in which a reader connects.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Annotated

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from benchmarks.place import Started, Workshop, megabytes, workshop
from benchmarks.run import Report, Row, median
from streaming_jobs import archive
from streaming_jobs.examples.flights import streams
from streaming_jobs.examples.flights.feeder import feed
from streaming_jobs.stream import DeltaTable

FLOWS = ["streaming_jobs.examples.flights.streams", "benchmarks.scenarios.archive"]
flights_archive = archive(streams.FLIGHTS)
TRIGGERS = {"none": "", "every 10 seconds": "every 10 seconds", "continuous": "continuous"}
"""The archive beside the stream, and its trigger."""
FLIGHTS = 336_776
_COMPILING = 10.0


def run(
    report: Report,
    *,
    rounds: int = 4,
    seconds: Annotated[float, "of a window"] = 20.0,
    rate: Annotated[float, "live flights per second"] = 200.0,
    part: tuple[str, ...] = ("live", "backlog"),
    records: Annotated[int, "of the backlog"] = FLIGHTS,
) -> None:
    with workshop({"flows": FLOWS}) as shop:
        shop.place.topics().create("flights", 3)
        if "live" in part:
            report.table("live", live(shop, rounds, seconds, rate))
        if "backlog" in part:
            report.table("backlog", backlog(shop, max(rounds // 2, 1), records))


def live(shop: Workshop, rounds: int, seconds: float, rate: float) -> list[Row]:
    """Windows without and with the archive, continuous or with a trigger, in turns."""
    total = rate * (seconds + 8) * len(TRIGGERS) * rounds
    share = min(1.0, total / FLIGHTS)
    threading.Thread(target=lambda: feed(shop.settings, share=share, rate=rate), daemon=True).start()
    clean = shop.start(streams.flights_clean, trigger="continuous")
    shop.wait(clean, _COMPILING)

    def window(trigger: str) -> None:
        archiving = shop.start(flights_archive, trigger=trigger) if trigger else None
        shop.wait(clean, seconds)
        if archiving is not None:
            shop.finish(archiving, seconds=120, stop=True)

    rows = shop.beside(clean, {name: partial(window, trigger) for name, trigger in TRIGGERS.items()}, rounds)
    shop.finish(clean, seconds=120, stop=True)
    return rows


def backlog(shop: Workshop, rounds: int, records: int) -> list[Row]:
    """The whole topic, from Kafka and from the archive."""
    feed(shop.settings, share=records / FLIGHTS, rate=None)
    shop.finish(shop.start(flights_archive), seconds=600)
    table = streams.flights_clean.primary
    assert isinstance(table, DeltaTable)
    rates: dict[str, list[float]] = {"Kafka": [], "archive": []}
    for source, measured in rates.items():
        if source == "archive":
            admin = AdminClient({"bootstrap.servers": shop.place.bootstrap})
            ends = shop.place.topics().latest("flights").items()
            for future in admin.delete_records([TopicPartition("flights", p, end) for p, end in ends]).values():
                future.result(60)
        for number in range(rounds):
            name = f"clean_{source.lower()}_{number}"
            sinks = {name: replace(table, name=name)}
            started = shop.start(replace(streams.flights_clean, name=name, rules={}, sinks=sinks))
            shop.finish(started, seconds=600)
            measured.append(_rate(started))
    on_disk = megabytes(shop.settings.tables / flights_archive.name)
    return [
        {"from": source, "records/s": round(median(each)), "of each": " ".join(f"{r:,.0f}" for r in each)}
        | {"archive MB": on_disk}
        for source, each in rates.items()
    ]


def _rate(started: Started) -> float:
    """Records per second of all batches but the first."""
    later = [batch for number, batch in started.progress.items() if number and batch.numInputRows]
    if not later:
        raise RuntimeError("the backlog was read in one batch: it needs more records")
    return float(sum(b.numInputRows for b in later) / sum(b.durationMs["triggerExecution"] for b in later) * 1000)
