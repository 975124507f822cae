"""Change events of a database on a real topic: the table is what the database has, also after a replay."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.support.debezium_flows import CLIENTS, clients
from tests.support.driver import Bench, produce, rows


def history(seed: int) -> tuple[list[tuple[bytes, bytes | None]], dict[int, str | None]]:
    """Records of a database's changes, with Debezium's tombstones, and the rows that are left."""
    chance, there, records = random.Random(seed), dict[int, str | None](), []
    for number in range(900):
        client = chance.randrange(60)
        before = {"id": client, "name": there[client]} if client in there else None
        if before is not None and chance.random() < 0.4:
            change: dict[str, Any] = {"op": "d", "before": before, "after": None}
            del there[client]
        else:
            there[client] = f"name {number}" if chance.random() < 0.9 else None
            after = {"id": client, "name": there[client]}
            change = {"op": "u" if before else "c", "before": before, "after": after}
        key = json.dumps({"id": client}).encode()
        records.append((key, json.dumps({**change, "ts_ms": number, "source": {"lsn": number}}).encode()))
        if change["op"] == "d":
            records.append((key, None))
    return records, there


def test_the_table_is_what_the_database_has_and_a_replay_with_other_batches_too(bench: Callable[..., Bench]) -> None:
    made = bench({"stream.max_offsets_per_trigger": 300})
    made.topics.create(CLIENTS.name, 2)
    records, there = history(7)
    produce(made.bootstrap, CLIENTS.name, [*records, (b"{}", b'{"op": "t", "ts_ms": 1}')])
    running = made.run(clients)
    assert running.status.error is None and (running.status.batch or 0) >= 3

    def left() -> dict[int, Any]:
        return {row["id"]: row["name"] for row in rows(made.settings, "clients")}

    assert left() == there
    assert [row["reason"] for row in rows(made.settings, "clients_dead_letters")] == ["unknown_op"]
    recourse = partial(made.recourse, "tests.support.debezium_flows", RECOURSE_STREAM__MAX_OFFSETS_PER_TRIGGER="170")
    plan = json.loads(recourse("recover", "plan", "clients", "--to-batch", "-1", "--output", "json"))["id"]
    recourse("recover", "apply", plan, "--yes")
    assert left() == there
    recourse("verify", "clients")
    made.topics.delete(CLIENTS.name)
