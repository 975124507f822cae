"""Which records prove what a topic has, and which consumer groups are asked for their offsets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from reprocessing.plan import written_topics
from reprocessing.plan.written_topics import WrittenTopics, _may_be_later
from streaming_jobs.ledger.entry import Txn
from tests.conftest import SettingsFactory


def of(stream: str, generation: int, batch: int) -> dict[str, bytes | None]:
    values = {"stream": stream, "generation": generation, "batch": batch}
    return {f"recourse.{name}": str(value).encode() for name, value in values.items()}


@pytest.mark.parametrize(
    ("headers", "later"),
    [
        (of("mine", 2, 7), False),
        (of("mine", 1, 9), False),
        (of("mine", 2, 8), True),
        (of("mine", 3, 0), True),
        (of("another", 5, 5), False),
        ({}, True),
        ({"recourse.stream": b"mine"}, True),
        ({**of("mine", 2, 7), "recourse.batch": None}, True),
    ],
)
def test_a_record_is_of_an_earlier_batch_of_another_stream_or_may_be_later(
    headers: dict[str, bytes | None], later: bool
) -> None:
    assert _may_be_later(headers, "mine", Txn(2, 7)) == later


@pytest.mark.parametrize(("prefix", "asked"), [("", ["billing", "shown.parity"]), ("shown.", ["billing"])])
def test_groups_that_show_streams_are_no_readers(
    settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch, prefix: str, asked: list[str]
) -> None:
    seen: list[str] = []

    class Admin:
        def __init__(self, _: object) -> None:
            pass

        def list_consumer_groups(self, **_: object) -> Any:
            groups = [SimpleNamespace(group_id=name) for name in ("shown.parity", "billing")]
            return SimpleNamespace(result=lambda _: SimpleNamespace(valid=groups))

        def list_consumer_group_offsets(self, places: Any, **_: object) -> dict[str, Any]:
            seen.extend(each.group_id for each in places)
            return {}

    monkeypatch.setattr(written_topics, "AdminClient", Admin)
    chosen = settings({"kafka.bootstrap_servers": "127.0.0.1:1", "kafka.group_prefix": prefix})
    assert WrittenTopics(chosen).committed("") == [] and seen == asked
