"""The present state of a stream as the commands show it: the verdict of `state.health`, and figures with their age.

A figure is shown without its age only while it is fresh. Where no driver reads the ends of the topics, the command does
(`with_lag`); where no broker answers either, the last known lag is shown with its age.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestration.cli.output import ago, number

if TYPE_CHECKING:
    from streaming_jobs.runtime.lag import Lag
    from streaming_jobs.settings import Settings
    from streaming_jobs.state.health import Health
    from streaming_jobs.state.lease import Owner
    from streaming_jobs.state.status import Status
    from streaming_jobs.stream import Stream

ENDED = ("stopped", "failed")
"""States that a session writes last, when it has ended."""

COLUMNS = [
    "stream",
    "state",
    "verdict",
    "recoveries",
    "last batch",
    "rows/s",
    "lag",
    "behind",
    "watermark",
    "dead letters",
    "heartbeat",
]
RIGHT = ["recoveries", "last batch", "rows/s", "lag", "behind", "dead letters", "heartbeat"]
_FRESH = 15.0
_RULES = 5
"""Age in seconds up to which a lag is shown without its age: a driver measures it every two seconds."""


@dataclass(frozen=True)
class Observed:
    """One stream at one moment (`at`, seconds since 1970); `owner` is the driver that runs it."""

    stream: str
    state: str
    at: float
    status: Status | None
    owner: Owner | None
    health: Health

    @property
    def live(self) -> bool:
        """True if a session runs the stream."""
        return self.owner is not None and self.state not in ("dead", *ENDED)

    @property
    def asked_to_stop(self) -> bool:
        """True if somebody asked the stream to stop, or to stay stopped."""
        return self.health.asked_to_stop

    @property
    def verdict(self) -> str:
        """The verdict in a word, with the reasons of red or yellow; a dash where the state is enough."""
        verdict = self.health.verdict
        if verdict in ("red", "yellow"):
            reasons = self.health.reasons or self.health.warnings
            return f"{verdict}: {', '.join(reason.word.replace('_', ' ') for reason in reasons)}"
        return verdict if verdict == "well" else "-"

    @property
    def recoveries(self) -> int | None:
        """Number of recoveries of the stream, undo and abort included."""
        return self.status.generation - 1 if self.status and self.status.generation else None

    @property
    def _running_code(self) -> str | None:
        """The hash of the code that runs; None if no session runs the stream."""
        return self.status.code_version.partition(" ")[0] if self.status and self.live else None

    @property
    def lag_age(self) -> float | None:
        """Age of the lag in seconds; None when there is no lag."""
        return self.at - self.status.lag_at if self.status and self.status.lag_at is not None else None

    @property
    def lag_is_fresh(self) -> bool:
        """True if the lag is shown without its age."""
        return self.lag_age is not None and self.lag_age <= _FRESH

    def as_json(self, home: str = "") -> dict[str, Any]:
        """The stable form: the status file's fields, the state as observed, the verdict, and who holds the lease."""
        status = self.status
        fields = asdict(status) if status else {"stream": self.stream}
        return {
            **fields,
            "state": self.state,
            "verdict": self.health.verdict,
            "red": self.health.red,
            "reasons": [asdict(reason) for reason in (*self.health.reasons, *self.health.warnings)],
            "notes": list(self.health.notes),
            "live": self.live,
            "recoveries": self.recoveries,
            "last_committed_batch": status.batch if status else None,
            "rows_written_since_session_began": status.rows_written if status else None,
            "holder_pid": self.owner.pid if self.owner else None,
            "heartbeat_age_s": _age(self.at, status.heartbeat if status else None),
            "lag_age_s": _age(self.at, status.lag_at if status else None),
            "rates_age_s": _age(self.at, status.progress_at if status else None),
            "batch_age_s": _age(self.at, status.committed_at if status else None),
            "running_code": self._running_code,
            "code_on_disk": (status.disk_code or self._running_code) if status and not status.disk_code_error else None,
            "asked_to_stop": self.asked_to_stop,
            "home": home,
        }

    def row(self) -> list[str]:
        """The cells of `COLUMNS`; a figure that is not fresh is shown with its age."""
        status = self.status
        if status is None:
            return [self.stream, self.state, self.verdict, *["-"] * (len(COLUMNS) - 3)]
        return [
            self.stream,
            self.state,
            self.verdict,
            number(self.recoveries),
            number(status.batch),
            number(status.processed_rows_per_s if self.live else None),
            self._aged(number(status.lag_records)),
            self._aged("-" if status.lag_s is None else ago(status.lag_s)),
            (status.watermark or "-")[:19].replace("T", " "),
            number(status.totals.dead_letters if status.totals else status.dead_letters),
            ago(self.at - status.heartbeat),
        ]

    def notes(self) -> list[str]:
        """Lines below the table: the reasons for red, the next step, warnings, a requested stop."""
        lines = [f"{self.stream}: {reason.text}" for reason in (*self.health.reasons, *self.health.warnings)]
        error = self.status.error if self.status else None
        if error and self.health.red and error.get("next"):
            lines.append(f"  next: {error['next']}")
        if self.status:
            lines += [f"{self.stream}: {warning}" for warning in self.status.warnings]
            lines += self._of_rules(self.status)
        return lines + [f"{self.stream}: {note}" for note in self.health.notes]

    def _of_rules(self, status: Status) -> list[str]:
        """A line about rows that broke row rules, in all sessions; the rules that most rows broke come first."""
        totals = status.totals
        if totals is None or not totals.broken:
            return []
        ranked = sorted(totals.broken.items(), key=lambda rule: -rule[1])
        shown = ", ".join(f"{name} {rows:,}" for name, rows in ranked[:_RULES])
        more = f" and {len(ranked) - _RULES} more rules" if len(ranked) > _RULES else ""
        gone = totals.quarantined or totals.dropped
        out = f"; {totals.quarantined:,} quarantined, {totals.dropped:,} dropped" if gone else ""
        return [f"{self.stream}: rows by broken rule: {shown}{more}{out}"]

    def _aged(self, text: str) -> str:
        if text == "-" or self.lag_is_fresh:
            return text
        return f"{text} ({ago(self.lag_age)} ago)" if self.lag_age is not None else "-"


def observe(settings: Settings, stream: str) -> Observed:
    """Look at one stream now."""
    from streaming_jobs.state.health import Limits, judge, look

    seen = look(settings, stream)
    verdict = judge(seen, Limits.of(settings, stream))
    return Observed(stream, verdict.state, seen.at, seen.status, seen.session, verdict)


def observe_all(settings: Settings, streams: Iterable[str]) -> list[Observed]:
    """Look at several streams now."""
    return [observe(settings, stream) for stream in streams]


def with_lag(settings: Settings, streams: Sequence[Stream], observed: Sequence[Observed]) -> list[Observed]:
    """The same with the present lag where no driver keeps it fresh; waits two seconds at most for a broker."""
    old = {o.stream: o.status for o in observed if o.status is not None and not (o.live and o.lag_is_fresh)}
    if not old:
        return list(observed)
    from streaming_jobs.runtime.lag import lag_now  # it loads the Kafka client

    before = {name: s.read_up_to for name, s in old.items() if s.read_up_to is not None}
    lags = lag_now(settings, [stream for stream in streams if stream.name in old], before)
    return [
        replace(o, at=max(o.at, lag.at), status=told(o.status, lag))
        if o.status is not None and (lag := lags.get(o.stream)) is not None
        else o
        for o in observed
    ]


def told(status: Status, lag: Lag) -> Status:
    """The status with this lag in it."""
    partitions = {topic: {str(p): n for p, n in each.items()} for topic, each in lag.partitions.items()}
    return replace(
        status,
        lag_at=lag.at,
        lag_records=lag.records,
        lag_s=lag.seconds,
        lag_partitions=partitions,
        read_up_to=lag.read_up_to if lag.seconds is not None else status.read_up_to,
    )


def _age(now: float, at: float | None) -> float | None:
    return round(now - at, 1) if at else None
