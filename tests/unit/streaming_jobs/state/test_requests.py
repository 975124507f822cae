"""Requests to stop and to start: who asks, for which plan, also in the words of an earlier version or by hand."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from streaming_jobs.runtime.stream_restarts import RestartReasons, StreamRestarts, Streams
from streaming_jobs.settings import Settings
from streaming_jobs.state.requests import START, STOP, RequestFile
from tests.conftest import SettingsFactory
from tests.support.objects import path_of


@pytest.fixture
def home(settings: SettingsFactory) -> Settings:
    return settings()


def test_who_asks_and_for_which_plan_is_in_the_file(home: Settings) -> None:
    STOP.ask(home, "count", 'asked by "me"')
    by_hand = STOP.request(home, "count")
    assert by_hand is not None and (by_hand.who, by_hand.plan) == ('asked by "me"', None)
    assert not STOP.for_recovery(home, "count")
    STOP.ask_for(home, "total", "total-0001")
    assert json.loads(path_of(STOP.handle(home, "total")).read_text())["plan"] == "total-0001"
    pending = STOP.request(home, "total")
    assert pending is not None and pending.who == "stopped for recovery plan total-0001"
    assert STOP.for_recovery(home, "total")


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
    path = path_of(START.handle(home, "count"))
    path.parent.mkdir(parents=True)
    path.write_text(text)
    pending = START.request(home, "count")
    assert pending is not None and (pending.who, pending.plan) == (who, plan)


def test_a_request_is_ended_by_whoever_has_seen_it_and_no_other_one(home: Settings) -> None:
    STOP.ask(home, "plain", "somebody")
    first = STOP.request(home, "plain")
    STOP.ask(home, "plain", "somebody")
    assert first is not None
    STOP.clear(home, "plain", first)
    assert STOP.asked(home, "plain")
    STOP.ask_for(home, "plain", "p-0001")
    STOP.clear_for(home, "plain", "p-0001")
    second = STOP.requests(home)["plain"]
    assert second.who == "somebody" and second != first
    STOP.clear(home, "plain", second)
    assert STOP.requests(home) == {}


def test_a_stop_file_that_cannot_be_read_stops_its_stream_and_no_other_one(home: Settings) -> None:
    (home.state / "plain" / "stop").mkdir(parents=True)
    with pytest.raises(OSError):
        STOP.request(home, "plain")
    assert STOP.asked(home, "plain") and not STOP.for_recovery(home, "plain")


@pytest.mark.parametrize("request_file", [STOP, START], ids=["stop", "start"])
def test_the_request_of_another_user_holds_although_it_cannot_be_read(
    home: Settings, monkeypatch: pytest.MonkeyPatch, request_file: RequestFile
) -> None:
    asked = request_file.ask(home, "plain", "root")

    def refused(*_: object, **__: object) -> object:
        raise PermissionError("it is root's")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refused)
        seen = request_file.request(home, "plain")
        assert seen is not None and (seen.who, seen.since, seen.plan) == ("", pytest.approx(asked.since, abs=5), None)
        request_file.clear(home, "plain", replace(seen, tag="another"))
        assert request_file.request(home, "plain") == seen
        request_file.clear(home, "plain", seen)
    assert not request_file.asked(home, "plain")
    path_of(request_file.handle(home, "plain")).write_bytes(b"by hand \xff")
    assert (again := request_file.request(home, "plain")) is not None and again.who.startswith("by hand")


def test_a_start_ends_the_requests_from_before_it_and_no_newer_one(home: Settings) -> None:
    def started(began: float) -> None:
        StreamRestarts(home, cast("Streams", None), RestartReasons(home, began=began)).started("orders")

    started(time.time())
    assert START.request(home, "orders") is None
    asked = START.ask(home, "orders", "anna")
    assert asked.who == "anna"
    started(asked.since - 1)
    assert START.request(home, "orders") == asked
    started(asked.since)
    assert START.request(home, "orders") is None
