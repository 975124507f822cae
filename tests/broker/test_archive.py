"""Archives on a real broker: what Kafka deletes comes from them, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest

from streaming_jobs.settings import Settings
from streaming_jobs.stream import Stream
from tests.broker.conftest import BenchFactory
from tests.support import archived
from tests.support.archived import APPEND, CREATE, delete_before, fill, in_order, truth
from tests.support.driver import assert_chained, ledger, rows

pytestmark = pytest.mark.timeout(300)
FLOWS = {"flows": ["tests.support.archived"]}


def seen(settings: Settings, table: str) -> list[dict[str, Any]]:
    """The rows of a copy, as the archive would have them; each says of itself whether it is a tombstone."""
    found = in_order(rows(settings, table))
    assert all(row.pop("tombstone") == (row["value"] is None) for row in found)
    return found


@pytest.mark.parametrize(
    ("topic", "keeper", "copy", "kind"),
    [
        (CREATE, archived.create_archive, archived.create_copy, "CreateTime"),
        (APPEND, archived.append_archive, archived.append_copy, "LogAppendTime"),
    ],
)
def test_what_kafka_has_deleted_comes_from_the_archive_as_kafka_gave_it(
    bench: BenchFactory, topic: str, keeper: Stream, copy: Stream, kind: str
) -> None:
    made = bench(FLOWS)
    made.topics.create(topic, 2, message_timestamp_type=kind)
    fill(made.bootstrap, topic, range(700))
    made.run(keeper)
    fill(made.bootstrap, topic, range(700, 1000))
    made.run(keeper)
    expected = truth(made.bootstrap, topic)
    assert {row["timestamp_type"] for row in expected} == {kind} and len(expected) == 1020
    assert in_order(rows(made.settings, keeper.name)) == expected
    assert rows(made.settings, keeper.dead_letters) == []
    assert_chained(ledger(made.settings, keeper.name))
    delete_before(made.bootstrap, topic, {0: 300, 1: 401})
    made.run(copy)
    assert seen(made.settings, copy.name) == expected
    assert [r.start for r in ledger(made.settings, copy.name)[0].offsets] == [{0: 0, 1: 0}], "from the archive's begin"
    made.topics.delete(topic)
