"""Consumer groups that are asked for their offsets: all but those that only show the offsets of streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from reprocessing.plan import written_topics
from reprocessing.plan.written_topics import WrittenTopics
from tests.conftest import SettingsFactory


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
    assert WrittenTopics(chosen).committed() == [] and seen == asked
