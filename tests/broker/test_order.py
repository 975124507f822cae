"""A table with `order_by` on a real topic: what it ends as does not depend on how the topic was cut into batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from deltalake import DeltaTable

from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.log import walk
from streaming_jobs.sinks.stored import entries
from tests.support.changes import PARTITIONS, customers, history
from tests.support.driver import Bench, produce, rows

TOPIC = "customers"


def fed(bench: Callable[..., Bench], **flags: Any) -> tuple[Bench, dict[str, int]]:
    """A bench with the changes in the topic, and who is left after them."""
    records, left = history()
    made = bench({"stream.max_offsets_per_trigger": flags["batch"]})
    if made.topics.describe(TOPIC):
        made.topics.delete(TOPIC)
    made.topics.create(TOPIC, PARTITIONS)
    produce(made.bootstrap, TOPIC, records)
    return made, left


def assert_left(settings: Settings, left: dict[str, int]) -> None:
    changes = {row["customer"]: row["changed"] for row in rows(settings, TOPIC)}
    wrong = {c for c in changes.keys() | left.keys() if changes.get(c) != left.get(c)}
    assert changes == left, (
        f"{len(wrong)} customers are wrong, {len(changes.keys() - left.keys())} of them should be gone"
    )


def test_a_topic_of_changes_and_tombstones_read_as_one_batch(bench: Callable[..., Bench]) -> None:
    made, left = fed(bench, batch=100_000)
    running = made.run(customers)
    assert running.status.error is None and running.status.batch == 0
    assert_left(made.settings, left)


def test_many_batches_end_as_the_same_table_and_so_does_a_replay_of_them_with_other_borders(
    bench: Callable[..., Bench],
) -> None:
    made, left = fed(bench, batch=500)
    running = made.run(customers)
    assert running.status.error is None and (running.status.batch or 0) >= 5
    assert_left(made.settings, left)
    deletes = remembered(made.settings, left)
    assert deletes
    recourse = partial(made.recourse, "tests.support.changes", RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER="900")

    plan = json.loads(recourse("recover", "plan", TOPIC, "--to-batch", "2", "--max-changed", "0%", "--output", "json"))[
        "id"
    ]
    recourse("recover", "apply", plan, "--yes")
    assert_left(made.settings, left)
    assert remembered(made.settings, left) == deletes
    published, *_ = entries(walk(made.settings.tables / TOPIC), 1)
    assert published[1].kind == "publish" and published[1].txns.keys() == {
        "customers_deletes",
        "customers_dead_letters",
    }
    assert made.run(customers).status.state == "stopped", "and the stream goes on from there"
    recourse("verify", TOPIC)


def remembered(settings: Settings, left: dict[str, int]) -> list[str]:
    """The remembered deletes of customers who are gone, without the time at which they were noted."""
    table = DeltaTable(settings.tables / "customers_deletes").to_pyarrow_table().drop_columns(["_deleted_at"])
    return sorted(repr(row) for row in table.to_pylist() if row["customer"] not in left)
