"""What an archive costs the stream beside it, and how quickly a backlog is read from it.

    python -m benchmarks.archive --rounds 4 --seconds 20 --out benchmarks/results/archive.json

Live: flights arrive at a steady rate, and `flights_clean` reads them all the time. The archive of the topic runs in the
same session in two windows of three, with two triggers; ms are of whole batches of `flights_clean` (triggerExecution),
without those of a window's first seconds. Backlog: the same stream reads the whole topic from Kafka, then, when Kafka
has deleted it, from the archive; records per second are of all its batches but the first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from dataclasses import replace
from datetime import datetime
from itertools import chain
from pathlib import Path

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from benchmarks.measuring import Figures, Started, Workshop, megabytes, named, quantile, quiet, save, table, workshop
from streaming_jobs import archive
from streaming_jobs.examples.flights import streams
from streaming_jobs.examples.flights.feeder import feed
from streaming_jobs.sources.topics import Topics

FLOWS = ["streaming_jobs.examples.flights.streams", "benchmarks.archive"]
flights_archive = archive(streams.FLIGHTS)
TRIGGERS = {"none": "", "every 10 seconds": "every 10 seconds", "continuous": "continuous"}
"""The archive beside the stream, and its trigger."""
_SETTLE = 4.0


def _stopped(shop: Workshop, started: Started) -> None:
    started.running.request_stop()
    shop.finish(started, seconds=120)


def _window(shop: Workshop, clean: Started, seconds: float) -> list[float]:
    """Milliseconds of the batches that begin within a window, without its first seconds."""
    begin = time.time() + _SETTLE
    ends = begin + seconds
    found: dict[int, float] = {}
    while time.time() < ends:
        clean.look(shop.spark)
        query = clean.running.query
        for report in query.recentProgress if query is not None else ():
            at = datetime.fromisoformat(report.timestamp).timestamp()
            if at >= begin and report.numInputRows and "addBatch" in report.durationMs:
                found[report.batchId] = float(report.durationMs["triggerExecution"])
        time.sleep(0.2)
    return list(found.values())


def live(shop: Workshop, rounds: int, seconds: float, rate: float) -> list[Figures]:
    """Alternating windows without and with the archive, continuous or with a trigger."""
    Topics.of(shop.settings.kafka, shop.bootstrap).create("flights", 3)
    total = rate * (seconds + _SETTLE + 8) * len(TRIGGERS) * rounds
    feeding = threading.Thread(
        target=lambda: feed(shop.settings, share=min(1.0, total / 336_776), rate=rate), daemon=True
    )
    feeding.start()
    clean = shop.start(streams.flights_clean, trigger="continuous")
    _window(shop, clean, 10)  # the JVM compiles
    times: dict[str, list[list[float]]] = {variant: [] for variant in TRIGGERS}
    for number in range(rounds):
        for variant in [*TRIGGERS][:: -1 if number % 2 else 1]:
            trigger = TRIGGERS[variant]
            beside = shop.start(flights_archive, trigger=trigger) if trigger else None
            times[variant].append(_window(shop, clean, seconds))
            if beside is not None:
                _stopped(shop, beside)
    _stopped(shop, clean)
    return [
        {
            "archive": variant,
            "batches": sum(map(len, each)),
            "p50 ms": round(quantile([*chain(*each)], 0.5), 1),
            "p95 ms": round(quantile([*chain(*each)], 0.95), 1),
            "p50 of each window": " ".join(f"{quantile(one, 0.5):.0f}" for one in each if one),
        }
        for variant, each in times.items()
    ]


def backlog(shop: Workshop, rounds: int) -> list[Figures]:
    """The whole topic, from Kafka and from the archive."""
    topics = Topics.of(shop.settings.kafka, shop.bootstrap)
    if topics.describe("flights") is None:
        topics.create("flights", 3)
    feed(shop.settings, rate=None)
    archived = shop.start(flights_archive)
    shop.finish(archived, seconds=600)
    plain = replace(streams.flights_clean, rules={})
    rates: dict[str, list[float]] = {"Kafka": [], "archive": []}
    for source, measured in rates.items():
        if source == "archive":
            ends = topics.latest("flights")
            admin = AdminClient({"bootstrap.servers": shop.bootstrap})
            wanted = [TopicPartition("flights", partition, end) for partition, end in ends.items()]
            for future in admin.delete_records(wanted).values():
                future.result(60)
        for number in range(rounds):
            started = shop.start(named(plain, f"clean_{source.lower()}_{number}"))
            shop.finish(started, seconds=600)
            measured.append(_rate(started))
    on_disk = megabytes(shop.settings.tables / flights_archive.name)
    return [
        {"from": source, "records/s": round(statistics.median(each)), "of each": " ".join(f"{r:,.0f}" for r in each)}
        | {"archive MB": round(on_disk, 1)}
        for source, each in rates.items()
    ]


def _rate(started: Started) -> float:
    """Records per second of all batches but the first, in which a reader connects."""
    later = [report for report in started.reports if report.batch and report.batch in started.progress]
    seconds = sum(started.progress[report.batch]["triggerExecution"] for report in later) / 1000
    return float(sum(report.records for report in later) / seconds)


def main() -> int:
    """Measure both and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.archive", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--part", choices=["live", "backlog", "both"], default="both")
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    quiet()
    with workshop({"flows": FLOWS}) as shop:
        first = live(shop, options.rounds, options.seconds, options.rate) if options.part != "backlog" else []
        sys.stdout.write(table(first) + "\n")
        sys.stdout.flush()
        second = backlog(shop, max(options.rounds // 2, 1)) if options.part != "live" else []
    sys.stdout.write(table(second))
    save(options.out, live=first, backlog=second)
    return 0


if __name__ == "__main__":
    sys.exit(main())
