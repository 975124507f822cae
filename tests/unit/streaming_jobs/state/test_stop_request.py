"""A stop that was asked for: who asked, for which plan, also in the words of an earlier version or by hand."""

from __future__ import annotations

import json

import pytest

from streaming_jobs.settings import Settings
from streaming_jobs.state import stop_request
from tests.conftest import SettingsFactory


@pytest.fixture
def home(settings: SettingsFactory) -> Settings:
    return settings()


def test_who_asks_and_for_which_plan_is_in_the_file(home: Settings) -> None:
    stop_request.ask(home, "count", 'asked by "me"')
    by_hand = stop_request.request(home, "count")
    assert by_hand is not None and (by_hand.who, by_hand.plan) == ('asked by "me"', None)
    assert not stop_request.for_recovery(home, "count")
    stop_request.ask_for(home, "total", "total-0001")
    assert json.loads(stop_request.marker(home, "total").read_text())["plan"] == "total-0001"
    pending = stop_request.request(home, "total")
    assert pending is not None and pending.who == "stopped for recovery plan total-0001"
    assert stop_request.for_recovery(home, "total")


@pytest.mark.parametrize(
    ("text", "who", "plan"),
    [
        ("", "", None),
        ("by hand\n", "by hand", None),
        ("stopped for recovery plan total-0001\n", "stopped for recovery plan total-0001", "total-0001"),
        ("17", "17", None),
        ('{"who": "me"}', "me", None),
    ],
)
def test_a_file_that_is_no_json_names_who(home: Settings, text: str, who: str, plan: str | None) -> None:
    path = stop_request.marker(home, "count")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    pending = stop_request.request(home, "count")
    assert pending is not None and (pending.who, pending.plan) == (who, plan)
