"""The shop: three streams, each of which reads the topic that the one before it writes, equal to the truth."""

from __future__ import annotations

from streaming_jobs.examples.shop import streams
from streaming_jobs.examples.shop.orders import orders, true_availability
from streaming_jobs.verification.verification import Options, verify_streams
from tests.broker.conftest import BenchFactory
from tests.support.driver import produce, rows

STAGES = (streams.stock_changes, streams.stock, streams.availability)


def test_what_can_be_ordered_follows_from_the_orders_through_two_topics(bench: BenchFactory) -> None:
    home, made = bench({"stream.max_offsets_per_trigger": 500}), orders(3000)
    for topic, partitions in streams.TOPICS.items():
        home.topics.create(topic, partitions)
    for begin, end in ((0, 1400), (1400, 3000)):
        produce(
            home.bootstrap, streams.ORDERS.name, ((order.product.encode(), order.value) for order in made[begin:end])
        )
        for stage in STAGES:
            home.run(stage)
        shown = sorted(rows(home.settings, "availability"), key=lambda row: str(row["product"]))
        assert [{k: row[k] for k in ("product", "pieces", "available")} for row in shown] == true_availability(
            made[:end]
        )
    for stage in STAGES:
        assert not rows(home.settings, f"{stage.name}_dead_letters")
    verdict, _ = verify_streams(home.settings, STAGES, [], home.bootstrap, Options(finished=True))
    assert verdict.ok, verdict
