"""Sends payments to their topic, for a person who tries the example:

    python -m streaming_jobs.examples.payments.feed --count 20000 --late 100

It continues after the records that the topic holds. A feed that was cut off may leave some of its payments out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from confluent_kafka import Producer

from streaming_jobs.errors import BrokerUnreachable, RecourseError
from streaming_jobs.examples.payments.payments import Payment, late_payments, payments
from streaming_jobs.examples.payments.streams import PAYMENTS, TOPICS
from streaming_jobs.platform.broker import bootstrap_servers
from streaming_jobs.settings import KafkaSettings, Settings
from streaming_jobs.sources.connection import client_config
from streaming_jobs.sources.topics import Topics
from streaming_jobs.text import commands


def feed(settings: Settings, count: int, late: int) -> int:
    """Send the next payments, and with them late ones; returns how many the topic then holds.

    Creates the topic if there is none. Raises BrokerUnreachable if the broker does not take them in time, and
    ValueError for late payments if the topic holds too few others.
    """
    bootstrap = bootstrap_servers(settings)
    topics = Topics.of(settings.kafka, bootstrap)
    if topics.describe(PAYMENTS.name) is None:
        topics.create(PAYMENTS.name, TOPICS[PAYMENTS.name])
    held = topics.offsets(PAYMENTS.name).total
    every = payments(held + count)
    send(settings.kafka, bootstrap, [*(late_payments(every[:held], late) if late else []), *every[held:]])
    return held + count + late


def send(kafka: KafkaSettings, bootstrap: str, made: Iterable[Payment]) -> None:
    """Send these payments, and wait until all are acknowledged; raises BrokerUnreachable."""
    seconds = kafka.timeout.total_seconds()
    options = {
        "enable.idempotence": True,
        "partitioner": "murmur2_random",
        "delivery.timeout.ms": int(seconds * 1000),
    }
    refused: list[str] = []
    producer = Producer({**client_config(kafka, bootstrap), **options})
    for payment in made:
        while True:
            try:
                producer.produce(
                    PAYMENTS.name,
                    key=payment.key,
                    value=payment.value,
                    on_delivery=lambda error, _: refused.append(str(error)) if error is not None else None,
                )
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    left = producer.flush(2 * seconds)
    if left or refused:
        why = next(iter(refused), "no answer")
        raise BrokerUnreachable(
            f"{left + len(refused):,} payments were not acknowledged by {bootstrap}: {why}",
            f"check the broker (`{commands.doctor()}`), then feed again",
        )


def main() -> int:
    """Feed, and say how many payments the topic holds."""
    parser = argparse.ArgumentParser(prog="python -m streaming_jobs.examples.payments.feed", description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="payments, one per second of event time")
    parser.add_argument("--late", type=int, default=0, help="payments for windows that are over by an hour")
    options = parser.parse_args()
    try:
        held = feed(Settings.load(), options.count, options.late)
    except (RecourseError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"topic {PAYMENTS.name} holds {held:,} payments\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
