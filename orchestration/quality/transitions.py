"""Which checks have changed between passed, warning and failed, and which messages still have to be sent.

A check that gets worse is reported once it has been worse for `Timing.after`, so that a failure of seconds wakes
nobody; an improvement at once, and a check that stays bad again each `Timing.remind`. A receiver gets
changes to and from its own least severity.

Pure: the sensor in `alerts.py` reads Dagster's storage, calls this, and sends. The state is the sensor's cursor, so it
outlives restarts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

State = Literal["passed", "warning", "failed"]
COLOUR: Mapping[State, str] = {"passed": "green", "warning": "yellow", "failed": "red"}
SEVERITY: Mapping[State, str] = {"passed": "info", "warning": "warning", "failed": "critical"}
RANK: Mapping[str, int] = {"unknown": 0, "passed": 0, "warning": 1, "failed": 2}
"""From good to bad."""

MOST_WAITING = 200
"""Queue limit of a receiver; beyond it, the oldest messages are dropped."""
GIVE_UP_AFTER = 24 * 3600.0
"""Seconds after which an undelivered message is dropped."""
FIRST_PAUSE, LONGEST_PAUSE = 30.0, 900.0
MOST_BYTES = 20_000
"""Of the messages in one request: chat services take 28 kB and more."""
_LONGEST_TEXT = 1000


@dataclass(frozen=True)
class ObservedCheck:
    """The newest outcome of a check: `id` is that of its record in Dagster's storage, `at` is since 1970."""

    check: str
    table: str
    id: int
    state: State
    text: str
    at: float
    run: str = ""
    stream: str = ""
    command: str = ""
    key: str = ""

    @property
    def name(self) -> str:
        """Identifies the check across ticks."""
        return self.key or f"{self.table}:{self.check}"


def by_stream(seen: Sequence[ObservedCheck], check: str) -> list[ObservedCheck]:
    """The outcomes, with one per stream instead of one per table: the worst, then the newest."""
    others = [one for one in seen if one.check != check]
    of_stream: dict[str, list[ObservedCheck]] = {}
    for one in seen:
        if one.check == check:
            of_stream.setdefault(one.stream, []).append(one)
    for stream, each in of_stream.items():
        worst = max(each, key=lambda one: (RANK[one.state], one.id))
        tables = ", ".join(sorted(one.table for one in each))
        others.append(replace(worst, table=tables, key=f"{stream}:{check}"))
    return others


@dataclass(frozen=True)
class Transition:
    """A check that changed; `id` is the same each time that it is sent, so that a receiver can drop a second one.

    `reminder`: the check is still bad, and unchanged since its last report. `command`: what to run next. `title`
    replaces the headline where it is no check that changed.
    """

    id: str
    check: str
    table: str
    stream: str
    state: State
    before: State | Literal["unknown"]
    text: str
    at: float
    run: str
    command: str = ""
    reminder: bool = False
    title: str = ""

    @property
    def severity(self) -> str:
        """`critical`, `warning`, or `info` for a check that is green again."""
        return SEVERITY[self.state]

    @property
    def bytes(self) -> int:
        """Its size in a request, about: the text is in it twice."""
        return 2 * len(json.dumps(asdict(self)))

    @property
    def headline(self) -> str:
        if self.title:
            return self.title
        if self.reminder:
            return f"{self.table}: check {self.check} is still {COLOUR[self.state]}"
        again = " again" if self.state == "passed" else ""
        return f"{self.table}: check {self.check} is {COLOUR[self.state]}{again}"


@dataclass(frozen=True)
class DeliveryFailure:
    """Why a delivery failed; `refused`: because of these messages, so fewer of them may be accepted."""

    text: str
    refused: bool = False


@dataclass(frozen=True)
class Receiver:
    """What one receiver has not taken yet, and when it is tried again (since 1970)."""

    waiting: tuple[Transition, ...] = ()
    failures: int = 0
    next_try: float = 0.0

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Self:
        """From its JSON; raises KeyError, TypeError or ValueError for something else."""
        waiting = tuple(Transition(**each) for each in value["waiting"])
        return cls(waiting, int(value["failures"]), float(value["next_try"]))

    def with_new(self, found: Sequence[Transition]) -> Self:
        """Append messages to the queue."""
        return replace(self, waiting=(*self.waiting, *found))

    def without_old(self, now: float) -> tuple[Self, list[Transition]]:
        """Drop messages that are too old or exceed the queue limit; returns them too."""
        young = [t for t in self.waiting if now - t.at < GIVE_UP_AFTER][-MOST_WAITING:]
        given_up = [t for t in self.waiting if t not in young]
        return replace(self, waiting=tuple(young)), given_up

    def chunk(self) -> tuple[Transition, ...]:
        """The messages of the next request, at most `MOST_BYTES`: first of checks that are critical now, newest first.

        Messages of one check keep their order.
        """
        newest = {f"{t.table}:{t.check}": t for t in self.waiting}

        def rank(one: Transition) -> tuple[int, float, str, float]:
            last = newest[f"{one.table}:{one.check}"]
            return -RANK[last.state], -last.at, f"{one.table}:{one.check}", one.at

        size = 0
        taken: list[Transition] = []
        for one in sorted(self.waiting, key=rank):
            size += one.bytes
            if taken and size > MOST_BYTES:
                break
            taken.append(one)
        return tuple(taken)

    def is_due(self, now: float) -> bool:
        """True if messages wait and the pause after the last failure is over."""
        return bool(self.waiting) and now >= self.next_try

    def without(self, done: Sequence[Transition]) -> Self:
        """Remove messages that were delivered or refused for good."""
        return type(self)(tuple(t for t in self.waiting if t not in done))

    def refused(self, now: float) -> Self:
        """Double the pause after a failed delivery."""
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**self.failures)
        return replace(self, failures=min(self.failures + 1, 10), next_try=now + pause)


def handed_over(
    queues: Mapping[str, Receiver], receivers: Iterable[str]
) -> tuple[dict[str, Receiver], dict[str, Receiver]]:
    """The queues of these receivers, and those queues with messages whose receiver is gone.

    A service whose URL was replaced, as with a new token, has another name: its queue is that of the one new service
    of the same kind, if just one of that kind is gone. So `queues` has every receiver, also with nothing waiting.
    """
    names = list(receivers)
    kept = {name: each for name, each in queues.items() if name in names}
    gone = {name: each for name, each in queues.items() if name not in names}
    lost: dict[str, Receiver] = {}
    for name, receiver in gone.items():
        heirs = [each for each in names if each not in queues and _kind(each) == _kind(name)]
        if len(heirs) == 1 and sum(_kind(each) == _kind(name) for each in gone) == 1:
            kept[heirs[0]] = Receiver(receiver.waiting)
        elif receiver.waiting:
            lost[name] = receiver
    return kept, lost


def _kind(receiver: str) -> str:
    """`slack` of the receiver `slack 3fa2c1`."""
    return receiver.partition(" ")[0]


@dataclass(frozen=True)
class Timing:
    """In seconds: how long a check must be worse before a report, and the interval of reminders while it stays bad.

    With 0, at once, and never.
    """

    after: float = 0.0
    remind: float = 0.0


@dataclass(frozen=True)
class Known:
    """The last reported state of a check, and when; `worse_since`: the first tick at which it was worse."""

    id: int
    state: State
    told_at: float = 0.0
    worse_since: float | None = None


@dataclass(frozen=True)
class Alerts:
    """The sensor's state: the last report of each check, and each receiver's queue."""

    known: Mapping[str, Known] = field(default_factory=dict)
    receivers: Mapping[str, Receiver] = field(default_factory=dict)

    def look(
        self, seen: Sequence[ObservedCheck], receivers: Mapping[str, State], now: float, timing: Timing | None = None
    ) -> tuple[Alerts, list[Transition]]:
        """The reports that are due; each waits for its receivers, which are given with their lowest severity.

        A check that is seen for the first time counts if it has not passed. A check that turned red and green again
        between two looks is not noticed.
        """
        looked = {one.name: self._looked(one, now, timing or Timing()) for one in seen}
        found = [change for _, change in looked.values() if change is not None]

        def concerns(change: Transition, least: State) -> bool:
            return max(RANK[change.state], RANK[change.before]) >= RANK[least]

        # A check without an outcome just now keeps its state: it may be of a location that is being reloaded.
        known = {**self.known, **{name: known for name, (known, _) in looked.items()}}
        waiting = {
            name: self.receivers.get(name, Receiver()).with_new([t for t in found if concerns(t, least)])
            for name, least in receivers.items()
        }
        return Alerts(known, waiting), found

    def _looked(self, one: ObservedCheck, now: float, timing: Timing) -> tuple[Known, Transition | None]:
        """The state of a check after an evaluation, and the transition to report."""
        last = self.known.get(one.name)
        before: State | Literal["unknown"] = last.state if last else "unknown"
        if last is None and one.state == "passed":
            return Known(one.id, one.state, now), None
        if last is not None and one.state == before:
            due = timing.remind and one.state != "passed" and now - last.told_at >= timing.remind
            if not due:
                return replace(last, id=one.id, worse_since=None), None
            return Known(one.id, one.state, now), self._told(replace(one, at=now), before, f":{int(now)}")
        if RANK[one.state] > RANK[before] and timing.after:
            since = last.worse_since if last is not None and last.worse_since is not None else now
            if now - since < timing.after:
                told: State = last.state if last is not None else "passed"
                return Known(one.id, told, last.told_at if last else now, since), None
        return Known(one.id, one.state, now), self._told(one, before)

    def _told(self, one: ObservedCheck, before: State | Literal["unknown"], reminder: str = "") -> Transition:
        return Transition(
            id=f"{one.name}:{one.id}:{one.state}{reminder}",
            check=one.check,
            table=one.table,
            stream=one.stream,
            state=one.state,
            before=before,
            text=one.text[:_LONGEST_TEXT],
            at=one.at,
            run=one.run,
            command=one.command,
            reminder=bool(reminder),
        )

    def cursor(self) -> str:
        return json.dumps(
            {
                "known": {name: [k.id, k.state, k.told_at, k.worse_since] for name, k in self.known.items()},
                "receivers": {name: asdict(one) for name, one in self.receivers.items()},
            },
            sort_keys=True,
        )

    @classmethod
    def of_cursor(cls, text: str | None) -> Alerts:
        """From `cursor`; an unreadable cursor counts as empty, which reports every red check once more."""
        try:
            found: dict[str, Any] = json.loads(text or "{}")
            known = {name: Known(int(id_), *rest) for name, (id_, *rest) in found.get("known", {}).items()}
            receivers = {name: Receiver.of(one) for name, one in found.get("receivers", {}).items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls()
        return cls(known, receivers)
