"""Which changes of checks are told, once, and what happens to those that a receiver does not take."""

from __future__ import annotations

import json

import pytest

from orchestration.quality.transitions import (
    FIRST_PAUSE,
    GIVE_UP_AFTER,
    LONGEST_PAUSE,
    MOST_WAITING,
    Alerts,
    Receiver,
    Seen,
    State,
)

NOW = 1_000_000.0


def seen(state: State, record: int = 1, check: str = "health", text: str = "...") -> Seen:
    return Seen(check, "orders", record, state, text, NOW, "run", "orders")


def told(*states: State) -> list[tuple[str, str]]:
    """What is told of a check that has these states one after the other; the cursor is stored each time."""
    alerts, found = Alerts(), []
    for number, state in enumerate(states):
        alerts, changes = Alerts.of_cursor(alerts.cursor()).look([seen(state, number)], ["webhook"])
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
    alerts, _ = Alerts().look([seen("failed"), seen("passed", check="rules")], [])
    alerts, changes = alerts.look([seen("passed", check="rules")], [])
    assert not changes
    assert [c.check for c in alerts.look([seen("failed"), seen("failed", 2, "rules")], [])[1]] == ["rules"]


def test_the_same_change_has_the_same_id_when_it_is_found_again_after_a_lost_cursor() -> None:
    first, again = (Alerts().look([seen("failed", 7)], [])[1][0].id for _ in range(2))
    assert first == again
    assert first != Alerts().look([seen("failed", 8)], [])[1][0].id


def test_what_waits_outlives_a_restart_and_a_receiver_that_the_settings_no_longer_name_does_not() -> None:
    alerts, _ = Alerts().look([seen("failed")], ["webhook", "e-mail"])
    alerts = Alerts.of_cursor(alerts.cursor())
    assert {name: len(r.waiting) for name, r in alerts.receivers.items()} == {"webhook": 1, "e-mail": 1}
    alerts, _ = alerts.look([], ["e-mail"])
    assert list(alerts.receivers) == ["e-mail"]


@pytest.mark.parametrize("text", [None, "", "no json", "[]", '{"known": 3}', '{"receivers": {"webhook": {}}}'])
def test_a_cursor_that_cannot_be_read_counts_as_none(text: str | None) -> None:
    assert Alerts.of_cursor(text) == Alerts()


def test_the_pause_doubles_to_a_bound_and_ends_with_a_delivery() -> None:
    receiver = Receiver().with_new(Alerts().look([seen("failed")], [])[1])
    assert receiver.is_due(NOW)
    pauses = []
    for _ in range(12):
        receiver = receiver.refused(NOW)
        pauses.append(receiver.next_try - NOW)
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE
    assert not receiver.is_due(NOW + LONGEST_PAUSE - 1)
    assert receiver.is_due(NOW + LONGEST_PAUSE)
    assert receiver.delivered() == Receiver()


def test_what_waits_is_bounded_in_time_and_number_and_what_is_given_up_is_known() -> None:
    changes = [Alerts().look([seen("failed", number)], [])[1][0] for number in range(MOST_WAITING + 3)]
    kept, given_up = Receiver().with_new(changes).without_old(NOW)
    assert (len(kept.waiting), [c.id[-8:] for c in given_up]) == (MOST_WAITING, ["0:failed", "1:failed", "2:failed"])
    assert kept.without_old(NOW + GIVE_UP_AFTER - 1)[0] == kept
    assert not kept.without_old(NOW + GIVE_UP_AFTER)[0].waiting


def test_the_cursor_stays_small_whatever_a_check_says() -> None:
    alerts, _ = Alerts().look([seen("failed", text="x" * 100_000)], ["webhook"])
    assert len(alerts.cursor()) < 2000
    assert json.loads(alerts.cursor())["known"] == {"orders:health": [1, "failed"]}
