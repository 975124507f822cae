"""Which checks have changed between passed, warning and failed, and which messages still have to be sent.

Pure: the sensor in `alerts.py` reads Dagster's storage, asks here, and sends. The state is the sensor's cursor, so it
outlives restarts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

State = Literal["passed", "warning", "failed"]
COLOUR: Mapping[State, str] = {"passed": "green", "warning": "yellow", "failed": "red"}

MOST_WAITING = 200
"""Messages that wait for one receiver; more, and the oldest are given up."""
GIVE_UP_AFTER = 24 * 3600.0
"""Seconds for which a message is offered to a receiver that does not take it."""
FIRST_PAUSE, LONGEST_PAUSE = 30.0, 900.0
_LONGEST_TEXT = 1000


@dataclass(frozen=True)
class Seen:
    """The newest outcome of a check: `id` is that of its record in Dagster's storage, `at` is since 1970."""

    check: str
    table: str
    id: int
    state: State
    text: str
    at: float
    run: str = ""
    stream: str = ""


@dataclass(frozen=True)
class Transition:
    """A check that changed; `id` is the same each time that it is sent, so that a receiver can drop a second one."""

    id: str
    check: str
    table: str
    stream: str
    state: State
    before: State | Literal["unknown"]
    text: str
    at: float
    run: str

    @property
    def headline(self) -> str:
        """One line."""
        again = " again" if self.state == "passed" else ""
        return f"{self.table}: check {self.check} is {COLOUR[self.state]}{again}"


@dataclass(frozen=True)
class Receiver:
    """What one receiver has not taken yet, and when it is tried again (since 1970)."""

    waiting: tuple[Transition, ...] = ()
    failures: int = 0
    next_try: float = 0.0

    def with_new(self, found: Sequence[Transition]) -> Self:
        """The new ones wait behind the others."""
        return replace(self, waiting=(*self.waiting, *found))

    def without_old(self, now: float) -> tuple[Self, list[Transition]]:
        """Give up what waits for too long, or is too much; returns that too."""
        young = [t for t in self.waiting if now - t.at < GIVE_UP_AFTER][-MOST_WAITING:]
        given_up = [t for t in self.waiting if t not in young]
        return replace(self, waiting=tuple(young)), given_up

    def is_due(self, now: float) -> bool:
        """True if something waits and the pause after the last failure is over."""
        return bool(self.waiting) and now >= self.next_try

    def delivered(self) -> Self:
        """All that waited was taken."""
        return type(self)()

    def refused(self, now: float) -> Self:
        """Nothing was taken: the pause doubles."""
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**self.failures)
        return replace(self, failures=min(self.failures + 1, 10), next_try=now + pause)


@dataclass(frozen=True)
class Alerts:
    """All that the sensor remembers: each check's last state, and each receiver."""

    known: Mapping[str, tuple[int, State]] = field(default_factory=dict)
    receivers: Mapping[str, Receiver] = field(default_factory=dict)

    def look(self, seen: Sequence[Seen], receivers: Sequence[str]) -> tuple[Alerts, list[Transition]]:
        """What has changed since the last look; it waits for each of the receivers.

        A check that is seen for the first time counts if it has not passed. A check that turned red and green again
        between two looks is not noticed.
        """
        found = [t for one in seen if (t := self._transition(one)) is not None]
        known = {_name(one): (one.id, one.state) for one in seen}
        # A check without an outcome just now keeps its state: it may be of a location that is being reloaded.
        return (
            Alerts(
                {**self.known, **known},
                {name: self.receivers.get(name, Receiver()).with_new(found) for name in receivers},
            ),
            found,
        )

    def _transition(self, one: Seen) -> Transition | None:
        last = self.known.get(_name(one))
        before: State | Literal["unknown"] = last[1] if last else "unknown"
        if one.state == before or (last is None and one.state == "passed"):
            return None
        return Transition(
            id=f"{_name(one)}:{one.id}:{one.state}",
            check=one.check,
            table=one.table,
            stream=one.stream,
            state=one.state,
            before=before,
            text=one.text[:_LONGEST_TEXT],
            at=one.at,
            run=one.run,
        )

    def cursor(self) -> str:
        """As text."""
        return json.dumps(
            {"known": self.known, "receivers": {name: asdict(one) for name, one in self.receivers.items()}},
            sort_keys=True,
        )

    @classmethod
    def of_cursor(cls, text: str | None) -> Alerts:
        """From `cursor`; one that cannot be read counts as none, which tells of every red check once more."""
        try:
            found: dict[str, Any] = json.loads(text or "{}")
            known = {name: (int(id_), state) for name, (id_, state) in found.get("known", {}).items()}
            receivers = {
                name: Receiver(
                    tuple(Transition(**t) for t in one["waiting"]), int(one["failures"]), float(one["next_try"])
                )
                for name, one in found.get("receivers", {}).items()
            }
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls()
        return cls(known, receivers)


def _name(one: Seen) -> str:
    return f"{one.table}:{one.check}"
