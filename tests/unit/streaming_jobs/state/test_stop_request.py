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


def test_a_request_is_ended_by_whoever_has_seen_it_and_no_other_one(home: Settings) -> None:
    stop_request.ask(home, "plain", "somebody")
    first = stop_request.request(home, "plain")
    stop_request.ask(home, "plain", "somebody")
    assert first is not None
    stop_request.clear(home, "plain", first)
    assert stop_request.asked(home, "plain")
    stop_request.ask_for(home, "plain", "p-0001")
    stop_request.clear_for(home, "plain", "p-0001")
    second = stop_request.requests(home)["plain"]
    assert second.who == "somebody" and second != first
    stop_request.clear(home, "plain", second)
    assert stop_request.requests(home) == {}


def test_a_stop_file_that_cannot_be_read_stops_its_stream_and_no_other_one(home: Settings) -> None:
    (home.state / "plain" / "stop").mkdir(parents=True)
    with pytest.raises(OSError):
        stop_request.request(home, "plain")
    assert stop_request.asked(home, "plain") and not stop_request.for_recovery(home, "plain")
