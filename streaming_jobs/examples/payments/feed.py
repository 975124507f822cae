"""Sends payments to their topic, for a person who tries the example:

    python -m streaming_jobs.examples.payments.feed --count 20000 --late 100

It continues after the records that the topic holds. A feed that was cut off may leave some of its payments out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from streaming_jobs.errors import RecourseError
from streaming_jobs.examples.payments.payments import Payment, late_payments, payments
from streaming_jobs.examples.payments.streams import PAYMENTS, TOPICS
from streaming_jobs.platform.broker import bootstrap_servers
from streaming_jobs.settings import KafkaSettings, Settings
from streaming_jobs.sources.producing import NewRecord, produce
from streaming_jobs.sources.topics import Topics


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
    produce(kafka, bootstrap, PAYMENTS.name, (NewRecord(payment.value, payment.key) for payment in made))


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
