"""`recourse demo topology`: a bug in the first of three streams, put right through the topics between them."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestration.cli.demo_steps import Steps
from streaming_jobs.errors import PermanentError

if TYPE_CHECKING:
    from streaming_jobs.settings import Settings

ORDERS = 30_000
RIGHT = 'F.when(F.col("unit") == "box", F.col("quantity") * PIECES_OF_A_BOX).otherwise(F.col("quantity"))'
WRONG = 'F.col("quantity")'
STREAMS = ("stock_changes", "stock", "availability")
CHANGES, LEVELS, TABLE = "shop_stock_changes", "shop_stock", "availability"


class ShopStory(Steps):
    """The shop: orders become changes of the stock, these its level, and this what can be ordered."""

    def __init__(self, folder: Path, settings: Settings, bootstrap: str, count: int = ORDERS) -> None:
        from streaming_jobs.examples.shop import orders, streams

        super().__init__(folder, settings, bootstrap, "shop_flows", Path(str(streams.__file__)), RIGHT)
        self.streams = STREAMS
        self.all = orders.orders(count)

    def tell(self) -> None:
        """Run all steps, from the first order to the recovery, its undo, and the recovery again."""
        half = len(self.all) // 2
        self.say(f"{half:,} orders and deliveries; stock_changes -> stock -> availability, topics between them")
        self.begin()
        self.feed(0, half)
        self.run_in_order()
        self.compare(half, right=True)
        self.recourse("streams", "describe")
        self.say("a new version of stock_changes forgets that a box has 12 pieces")
        self.deploy(WRONG)
        self.feed(half, len(self.all))
        self.run_in_order()
        self.compare(len(self.all), right=False)
        self.say("the function is corrected. The plan takes the streams along that read its records")
        self.deploy(RIGHT)
        plan = self.plan()
        self.recourse("recover", "apply", plan, "--yes")
        self.compare(len(self.all), right=True)
        self.say("and back: the old rows, and the old records count again")
        self.recourse("recover", "undo", plan, "--yes")
        self.compare(len(self.all), right=False)
        self.say("and once more, for good: it goes back behind the ranges that the first one has declared void")
        self.recourse("recover", "apply", self.plan(), "--yes")
        self.compare(len(self.all), right=True)
        self.recourse("recover", "list")
        self.say(f"done in {time.monotonic() - self.began:.0f} s")

    def begin(self) -> None:
        """Make the topics, and deploy the right code."""
        from streaming_jobs.examples.shop.streams import TOPICS
        from streaming_jobs.sources.topics import Topics

        topics = Topics.of(self.settings.kafka, self.bootstrap)
        for topic, partitions in TOPICS.items():
            topics.create(topic, partitions)
        self.code.write_text(self.text, encoding="utf-8")

    def feed(self, begin: int, end: int) -> None:
        """Send orders."""
        from streaming_jobs.examples.shop.orders import send

        send(self.settings.kafka, self.bootstrap, self.all[begin:end])

    def run_in_order(self) -> None:
        """Run each stream until it has read what the one before it has written."""
        for name in self.streams:
            self.run_streams([name])

    def plan(self) -> str:
        """Plan the recovery of `stock_changes` to before its second version of the code; show it; return its name."""
        from streaming_jobs.state import stream_record

        record = stream_record.load(self.settings, "stock_changes")
        assert record is not None
        arguments = ["recover", "plan", "stock_changes", "--before-code", record.code[1].hash]
        plan = str(json.loads(self.recourse(*arguments, "--output", "json", quiet=True))["id"])
        self.recourse("recover", "show", plan)
        return plan

    def compare(self, count: int, *, right: bool) -> None:
        """Compare the table and both topics with the truth; raises PermanentError if they are not as expected."""
        from streaming_jobs.examples.shop import orders

        truth = self.all[:count]
        changes = Counter((r["product"], r["pieces"]) for r in self.counting(CHANGES))
        levels = {r["product"]: (r["pieces"], r["changes"]) for r in self.counting(LEVELS)}
        shown = sorted(({k: r[k] for k in ("product", "pieces", "available")} for r in self.rows(TABLE)), key=_product)
        same = {
            CHANGES: changes == Counter((order.product, order.pieces) for order in truth),
            LEVELS: levels == orders.true_levels(truth),
            TABLE: shown == orders.true_availability(truth),
        }
        self.say("  " + "; ".join(f"{name} {'equals' if ok else 'is not'} the truth" for name, ok in same.items()))
        if set(same.values()) != {right}:
            raise PermanentError("the shop is not what the story says", f"look at it: --keep, {self.folder}")

    def counting(self, topic: str) -> Sequence[Mapping[str, Any]]:
        """The values of a topic's records that are not void, in the order of each partition."""
        from streaming_jobs.sources.topics import Topics
        from streaming_jobs.state.topic_records import void_of
        from streaming_jobs.verification.topic import RawRecord, TopicReader

        info = Topics.of(self.settings.kafka, self.bootstrap).describe(topic)
        assert info is not None
        void, found = void_of(self.settings, topic, info.id), list[RawRecord]()
        TopicReader.at(self.settings.kafka, self.bootstrap, topic).content(each=found.append)
        return [
            json.loads(record.value or b"{}")
            for record in found
            if not void.count({record.partition: (record.offset, record.offset + 1)})
        ]


def _product(row: Mapping[str, Any]) -> str:
    return str(row["product"])
