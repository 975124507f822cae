"""Which changes of checks are told, once, and what happens to those that a receiver does not take."""

from __future__ import annotations

import json

import pytest

from orchestration.quality.transitions import (
    FIRST_PAUSE,
    GIVE_UP_AFTER,
    LONGEST_PAUSE,
    MOST_BYTES,
    MOST_WAITING,
    Alerts,
    ObservedCheck,
    Receiver,
    State,
    Timing,
    by_stream,
    handed_over,
)

NOW = 1_000_000.0
BOTH: dict[str, State] = {"webhook": "warning"}


def seen(state: State, record: int = 1, check: str = "health", text: str = "...") -> ObservedCheck:
    return ObservedCheck(check, "orders", record, state, text, NOW, "run", "orders")


def told(*states: State) -> list[tuple[str, str]]:
    """What is told of a check that has these states one after the other; the cursor is stored each time."""
    alerts, found = Alerts(), []
    for number, state in enumerate(states):
        alerts, changes = Alerts.of_cursor(alerts.cursor()).look([seen(state, number)], BOTH, NOW)
        found += [(change.before, change.state) for change in changes]
    assert len(alerts.receivers["webhook"].waiting) == len(found), "each waits for its receiver"
    return found


@pytest.mark.parametrize(
    ("states", "changes"),
    [
        (["passed"], []),
        (["failed"], [("unknown", "failed")]),
        (["passed", "failed", "failed", "passed"], [("passed", "failed"), ("failed", "passed")]),
        (["warning", "failed", "warning"], [("unknown", "warning"), ("warning", "failed"), ("failed", "warning")]),
        (["failed", "passed", "passed"], [("unknown", "failed"), ("failed", "passed")]),
    ],
)
def test_each_change_is_told_once(states: list[State], changes: list[tuple[str, str]]) -> None:
    assert told(*states) == changes


def test_two_checks_of_a_table_and_a_check_that_is_missing_for_a_while_are_not_mixed_up() -> None:
    alerts, _ = Alerts().look([seen("failed"), seen("passed", check="rules")], {}, NOW)
    alerts, changes = alerts.look([seen("passed", check="rules")], {}, NOW)
    assert not changes
    assert [c.check for c in alerts.look([seen("failed"), seen("failed", 2, "rules")], {}, NOW)[1]] == ["rules"]


def test_the_same_change_has_the_same_id_when_it_is_found_again_after_a_lost_cursor() -> None:
    first, again = (Alerts().look([seen("failed", 7)], {}, NOW)[1][0].id for _ in range(2))
    assert first == again
    assert first != Alerts().look([seen("failed", 8)], {}, NOW)[1][0].id


def test_what_waits_outlives_a_restart_and_a_receiver_that_the_settings_no_longer_name_does_not() -> None:
    alerts, _ = Alerts().look([seen("failed")], {"webhook": "warning", "e-mail": "failed"}, NOW)
    alerts = Alerts.of_cursor(alerts.cursor())
    assert {name: len(r.waiting) for name, r in alerts.receivers.items()} == {"webhook": 1, "e-mail": 1}
    alerts, _ = alerts.look([], {"e-mail": "failed"}, NOW)
    assert list(alerts.receivers) == ["e-mail"]


@pytest.mark.parametrize(
    ("before", "names", "kept", "lost"),
    [
        (["slack 1"], ["slack 2"], {"slack 2": 1}, {}),  # a new token
        (["slack 1", "webhook"], ["slack 2", "webhook"], {"slack 2": 1, "webhook": 1}, {}),
        (["slack 1"], ["slack 2", "slack 3"], {}, {"slack 1": 1}),
        (["slack 1", "slack 2"], ["slack 3"], {}, {"slack 1": 1, "slack 2": 1}),
        (["slack 1", "slack 2"], ["slack 2"], {"slack 2": 1}, {"slack 1": 1}),
        (["slack 1"], ["json 2"], {}, {"slack 1": 1}),
        (["webhook"], [], {}, {"webhook": 1}),
    ],
)
def test_what_waits_for_a_service_whose_token_was_replaced_is_that_of_the_new_one_or_is_known_to_be_lost(
    before: list[str], names: list[str], kept: dict[str, int], lost: dict[str, int]
) -> None:
    (change,) = Alerts().look([seen("failed")], BOTH, NOW)[1]
    waiting = Receiver((change,)).refused(NOW)
    queues, gone = handed_over(dict.fromkeys(before, waiting), names)
    assert {name: len(each.waiting) for name, each in queues.items()} == kept
    assert {name: len(each.waiting) for name, each in gone.items()} == lost
    after, _ = Alerts({}, queues).look([], dict.fromkeys(names, "warning"), NOW)  # type: ignore[arg-type]
    assert {name: len(each.waiting) for name, each in after.receivers.items() if each.waiting} == kept


def test_a_new_token_is_tried_at_once_and_an_empty_queue_is_no_loss() -> None:
    (change,) = Alerts().look([seen("failed")], BOTH, NOW)[1]
    queues, _ = handed_over({"slack 1": Receiver((change,)).refused(NOW)}, ["slack 2"])
    assert queues["slack 2"].is_due(NOW)
    assert handed_over({"slack 1": Receiver()}, []) == ({}, {})


@pytest.mark.parametrize("text", [None, "", "no json", "[]", '{"known": 3}', '{"receivers": {"webhook": {}}}'])
def test_a_cursor_that_cannot_be_read_counts_as_none(text: str | None) -> None:
    assert Alerts.of_cursor(text) == Alerts()


def test_the_pause_doubles_to_a_bound_and_ends_with_a_delivery() -> None:
    receiver = Receiver().with_new(Alerts().look([seen("failed")], {}, NOW)[1])
    assert receiver.is_due(NOW)
    pauses = []
    for _ in range(12):
        receiver = receiver.refused(NOW)
        pauses.append(receiver.next_try - NOW)
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE
    assert not receiver.is_due(NOW + LONGEST_PAUSE - 1)
    assert receiver.is_due(NOW + LONGEST_PAUSE)
    assert receiver.without(receiver.waiting) == Receiver()


def test_what_waits_is_bounded_in_time_and_number_and_what_is_given_up_is_known() -> None:
    changes = [Alerts().look([seen("failed", number)], {}, NOW)[1][0] for number in range(MOST_WAITING + 3)]
    kept, given_up = Receiver().with_new(changes).without_old(NOW)
    assert (len(kept.waiting), [c.id[-8:] for c in given_up]) == (MOST_WAITING, ["0:failed", "1:failed", "2:failed"])
    assert kept.without_old(NOW + GIVE_UP_AFTER - 1)[0] == kept
    assert not kept.without_old(NOW + GIVE_UP_AFTER)[0].waiting


def test_the_cursor_stays_small_whatever_a_check_says() -> None:
    alerts, _ = Alerts().look([seen("failed", text="x" * 100_000)], BOTH, NOW)
    assert len(alerts.cursor()) < 2000
    assert json.loads(alerts.cursor())["known"] == {"orders:health": [1, "failed", NOW, None]}


def over_time(timing: Timing, *states: tuple[float, State]) -> list[tuple[float, str, bool]]:
    """What is told, and when, of a check that has these states at these seconds; the cursor is stored each time."""
    alerts, found = Alerts(), []
    for number, (at, state) in enumerate(states):
        alerts, changes = Alerts.of_cursor(alerts.cursor()).look([seen(state, number)], BOTH, NOW + at, timing)
        found += [(at, change.state, change.reminder) for change in changes]
    return found


def test_what_mends_itself_before_the_time_is_not_told_and_what_stays_is() -> None:
    timing = Timing(after=60)
    assert over_time(timing, (0, "passed"), (30, "failed"), (60, "passed"), (90, "failed"), (120, "passed")) == []
    assert over_time(timing, (0, "failed"), (30, "failed"), (60, "failed"), (90, "failed"), (120, "passed")) == [
        (60, "failed", False),
        (120, "passed", False),
    ]
    # yellow in between is no mending, and red that was told turns yellow at once
    assert over_time(timing, (0, "warning"), (30, "failed"), (60, "failed"), (90, "warning")) == [
        (60, "failed", False),
        (90, "warning", False),
    ]


def test_what_stays_bad_is_told_again_and_what_is_green_is_not() -> None:
    states: list[tuple[float, State]] = [(hour * 3600.0, "failed") for hour in range(10)]
    hours = [(at / 3600, reminder) for at, _, reminder in over_time(Timing(remind=4 * 3600), *states)]
    assert hours == [(0, False), (4, True), (8, True)]
    assert over_time(Timing(remind=3600), *((at, "passed") for at in (0.0, 7200.0, 14400.0))) == []
    (change,) = Alerts().look([seen("failed")], BOTH, NOW)[1]
    again = (
        Alerts().look([seen("failed")], BOTH, NOW)[0].look([seen("failed")], BOTH, NOW + 9e9, Timing(remind=1))[1][0]
    )
    assert again.headline == "orders: check health is still red" and again.id != change.id


def test_a_receiver_is_told_of_changes_to_and_from_its_least_severity() -> None:
    alerts, receivers = Alerts(), {"webhook": "warning", "e-mail": "failed"}
    for number, state in enumerate(["warning", "failed", "warning", "passed"]):
        alerts, _ = alerts.look([seen(state, number)], receivers, NOW)  # type: ignore[arg-type]
    told = {name: [change.state for change in each.waiting] for name, each in alerts.receivers.items()}
    assert told == {"webhook": ["warning", "failed", "warning", "passed"], "e-mail": ["failed", "warning"]}


def test_a_stream_is_told_once_for_all_its_tables() -> None:
    tables = [
        ObservedCheck("health", "orders", 1, "passed", "...", NOW, stream="shop"),
        ObservedCheck("health", "customers", 2, "failed", "dead", NOW, stream="shop"),
        ObservedCheck("rows", "orders", 3, "failed", "...", NOW, stream="shop"),
    ]
    alerts, found = Alerts().look(by_stream(tables, "health"), BOTH, NOW)
    assert [(each.table, each.check, each.state) for each in found] == [
        ("orders", "rows", "failed"),
        ("customers, orders", "health", "failed"),
    ]
    assert not alerts.look(by_stream(tables[1:], "health"), BOTH, NOW)[1], "a table without an outcome just now"


def test_a_request_is_bounded_and_begins_with_what_is_critical_now_the_newest_first() -> None:
    changes = []
    for number, state in enumerate(["failed", "warning", "failed", "failed"]):
        one = ObservedCheck(f"c{number}", "orders", number, state, "x" * 900, NOW + number)  # type: ignore[arg-type]
        changes += Alerts().look([one], BOTH, NOW)[1]
    green = Alerts().look([ObservedCheck("c2", "orders", 9, "failed", "", NOW)], BOTH, NOW)[0]
    changes += green.look([ObservedCheck("c2", "orders", 10, "passed", "", NOW + 9)], BOTH, NOW)[1]
    receiver = Receiver(tuple(changes))
    assert [(each.check, each.state) for each in receiver.chunk()] == [
        ("c3", "failed"),
        ("c0", "failed"),
        ("c1", "warning"),
        ("c2", "failed"),
        ("c2", "passed"),
    ]
    many = Receiver(tuple(changes[:1] * 100))
    assert 1 < len(many.chunk()) < 100 and sum(each.bytes for each in many.chunk()) <= MOST_BYTES


def test_the_cursor_of_an_older_version_is_read() -> None:
    old = Alerts.of_cursor('{"known": {"orders:health": [1, "failed"]}, "receivers": {}}')
    assert old.look([seen("failed")], BOTH, NOW)[1] == []
    assert [change.before for change in old.look([seen("passed", 2)], BOTH, NOW)[1]] == ["failed"]
