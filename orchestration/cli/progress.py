"""The present state of streams as the commands show it: status, unread records, progress to the end of the topics.

A figure is shown without its age only while it is fresh. Where no driver reads the ends of the topics, the command does
(`with_lag`); where no broker answers either, the last known lag is shown with its age.

On a terminal, progress is drawn in place (`Bars` of a session that catches up, `Screen` of `recourse up`), otherwise
printed as lines now and then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from orchestration.cli.options import Invocation
from orchestration.cli.text import ago, make_table, number, print_table, progress_bar, say, stderr_console
from streaming_jobs.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Group
    from rich.progress import TaskID

    from orchestration.cli.up import FeederState
    from streaming_jobs.runtime.lag import PartitionLag, StreamLag, Unread
    from streaming_jobs.settings import Settings
    from streaming_jobs.state.health import Health
    from streaming_jobs.state.lease import Owner
    from streaming_jobs.state.status import Status
    from streaming_jobs.stream import Stream


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
_UNREAD_COLUMNS = ["topic", "partition", "next offset", "end", "lag", "oldest unread", "age"]
_RULES_SHOWN = 5
_MOST_SHOWN = 40
"""Partitions whose lag is printed, those with the most unread records."""
_RATE_OVER = 15.0
"""Seconds over which the rate of a session that catches up is measured."""


@dataclass(frozen=True)
class ObservedStream:
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
        from streaming_jobs.state.health import is_live

        return is_live(self.owner, self.state)

    @property
    def asked_to_stop(self) -> bool:
        """True if the stream was asked to stop, or to stay stopped."""
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
        return self.status.generation - 1 if self.status and self.status.generation else None

    @property
    def _running_code(self) -> str | None:
        """The hash of the code that runs; None if no session runs the stream."""
        return self.status.code_hash if self.status and self.live else None

    @property
    def lag_age(self) -> float | None:
        """Age of the lag in seconds; None when there is no lag."""
        return self.at - self.status.lag_at if self.status and self.status.lag_at is not None else None

    @property
    def lag_is_fresh(self) -> bool:
        """True if the lag is shown without its age."""
        from streaming_jobs.state.health import LAG_FRESH

        return self.lag_age is not None and self.lag_age <= LAG_FRESH

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
        """A line about rows that broke row rules, in all sessions; the most frequently broken rules come first."""
        totals = status.totals
        if totals is None or not totals.broken:
            return []
        ranked = sorted(totals.broken.items(), key=lambda rule: -rule[1])
        shown = ", ".join(f"{name} {rows:,}" for name, rows in ranked[:_RULES_SHOWN])
        more = f" and {len(ranked) - _RULES_SHOWN} more rules" if len(ranked) > _RULES_SHOWN else ""
        gone = totals.quarantined or totals.dropped
        out = f"; {totals.quarantined:,} quarantined, {totals.dropped:,} dropped" if gone else ""
        return [f"{self.stream}: rows by broken rule: {shown}{more}{out}"]

    def _aged(self, text: str) -> str:
        if text == "-" or self.lag_is_fresh:
            return text
        return f"{text} ({ago(self.lag_age)} ago)" if self.lag_age is not None else "-"


def observe(settings: Settings, stream: str) -> ObservedStream:
    from streaming_jobs.state.health import HealthLimits, judge, look

    seen = look(settings, stream)
    verdict = judge(seen, HealthLimits.of(settings, stream))
    return ObservedStream(stream, verdict.state, seen.at, seen.status, seen.session, verdict)


def observe_all(settings: Settings, streams: Iterable[str]) -> list[ObservedStream]:
    return [observe(settings, stream) for stream in streams]


def with_lag(settings: Settings, streams: Sequence[Stream], observed: Sequence[ObservedStream]) -> list[ObservedStream]:
    """The streams with the present lag where no driver keeps it fresh; waits two seconds at most for a broker."""
    old = {o.stream: o.status for o in observed if o.status is not None and not (o.live and o.lag_is_fresh)}
    if not old or not streams:
        return list(observed)
    from streaming_jobs.runtime.lag import lag_now  # it loads the Kafka client

    before = {name: s.read_up_to for name, s in old.items() if s.read_up_to is not None}
    lags = lag_now(settings, [stream for stream in streams if stream.name in old], before)
    return [
        replace(o, at=max(o.at, lag.at), status=with_lag_of(o.status, lag))
        if o.status is not None and (lag := lags.get(o.stream)) is not None
        else o
        for o in observed
    ]


def with_lag_of(status: Status, lag: StreamLag) -> Status:
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


def declared_or_known(call: Invocation, names: list[str]) -> list[str]:
    """The named streams, or all; if the code on disk cannot be loaded, the streams that have run here."""
    from streaming_jobs.state.status import streams_with_status

    try:
        declared = call.topology
    except UsageError as error:
        if not (known := [name for name in streams_with_status(call.settings) if not names or name in names]):
            raise
        say(f"the code on disk cannot be loaded: {error.found}")
        return known
    return [stream.name for stream in declared.select(dict.fromkeys(names))]


def observed_now(call: Invocation, names: list[str]) -> list[ObservedStream]:
    """These streams now, with the present lag if a broker answers."""
    return with_lag(call.settings, _declared(call, names), observe_all(call.settings, names))


def _declared(call: Invocation, names: list[str]) -> list[Stream]:
    """These streams; none if the code on disk cannot be loaded: without it, their topics are not known."""
    try:
        return [call.topology[name] for name in names]
    except UsageError:
        return []


def unread_now(call: Invocation, observed: Sequence[ObservedStream]) -> dict[str, Unread]:
    """The unread records of each stream; empty if no broker answers, or if the code on disk cannot be loaded."""
    streams = _declared(call, [o.stream for o in observed if o.status is not None and o.lag_is_fresh])
    if not streams:
        return {}
    from streaming_jobs.runtime.lag import unread_now as look  # it loads the Kafka client

    return look(call.settings, streams)


def print_state(observed: ObservedStream) -> None:
    """Print the size of the state by operator, if the stream keeps any."""
    from streaming_jobs.text.spelling import counted

    for each in observed.status.state_operators if observed.status is not None else ():
        say(f"{observed.stream}: {each['name']} keeps {counted(each['rows'], 'row')}, {each['mb']:,g} MB in memory")
    if observed.status is not None and observed.status.state_skew is not None:
        say(f"{observed.stream}: skew {observed.status.state_skew:g} (fullest partition of the state : average one)")


def print_unread(observed: ObservedStream, unread: Unread | None) -> None:
    """Print the partitions of a stream; without a broker the last known records of each, with their age."""
    if unread is None:
        _print_last_known(observed)
        return
    from streaming_jobs.text.spelling import instant_words

    age, unit = unread.oldest_age, unread.unit
    if not unread.records:
        say(f"{observed.stream}: everything in its {'tables' if unit == 'version' else 'topics'} is read")
    elif age is None or unread.oldest is None:
        say(f"{observed.stream}: {unread.records:,} {unit}s unread; none of them could be read within two seconds")
    else:
        say(
            f"{observed.stream}: {unread.records:,} {unit}s unread; by timestamps the oldest is of "
            f"{instant_words(unread.oldest)}, {ago(age)} old"
        )
    shown = sorted(unread.partitions, key=lambda each: -each.records)[:_MOST_SHOWN]
    rows = [_row(each, unread.at) for each in sorted(shown, key=lambda each: (each.topic, each.partition))]
    print()
    print_table(_UNREAD_COLUMNS, rows, right=_UNREAD_COLUMNS[1:5])
    if len(unread.partitions) > _MOST_SHOWN:
        left = len(unread.partitions) - _MOST_SHOWN
        say(f"{left} more partitions, with fewer unread records: -o json has all of them")


def _row(each: PartitionLag, at: float) -> list[str]:
    from streaming_jobs.text.spelling import instant_words

    oldest = ["not read in time", "?"] if each.oldest is None else [instant_words(each.oldest), ago(at - each.oldest)]
    return [
        each.topic,
        str(each.partition),
        number(each.position),
        number(each.end),
        number(each.records),
        *(oldest if each.records else ["-", "-"]),
    ]


def _print_last_known(observed: ObservedStream) -> None:
    status = observed.status
    if status is None or not status.lag_partitions or observed.lag_age is None:
        return
    say(
        f"{observed.stream}: the end of its topics cannot be seen; the lag by partition {ago(observed.lag_age)} ago was"
    )
    rows = [
        [topic, partition, number(records)]
        for topic, each in sorted(status.lag_partitions.items())
        for partition, records in sorted(each.items(), key=lambda pair: int(pair[0]))
    ]
    print()
    print_table(["topic", "partition", "lag"], rows[:_MOST_SHOWN], right=["partition", "lag"])


@dataclass(frozen=True)
class Standing:
    """One stream: records read, records in all, the current batch, the rate of the last 15 s, seconds left."""

    stream: str
    done: int
    total: int
    batch: int | None
    rate: float | None
    left: float | None

    @property
    def figures(self) -> dict[str, str]:
        """The rate, the lag and the time left as text."""
        return {
            "rate": "-" if self.rate is None else number(round(self.rate)),
            "lag": number(self.total - self.done),
            "left": "-" if self.left is None else ago(self.left),
        }

    def __str__(self) -> str:
        batch = "no batch yet" if self.batch is None else f"batch {self.batch}"
        read = f"{number(self.done)} of {number(self.total)} records"
        return f"{self.stream}: {read}, {batch}, {{rate}} records/s, lag {{lag}}, {{left}} left".format(**self.figures)


Positions = Callable[[str], tuple[Mapping[str, Mapping[int, int]], int | None]]
"""Reads from a stream's files its position by topic and partition, and the current or last batch."""


@dataclass
class Rate:
    """Measures records per second, by a monotonic clock."""

    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, now: float, done: int) -> float | None:
        """Record a position and return the rate, or None before the first batch is done."""
        if not self._seen or done != self._seen[-1][1]:
            self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] > _RATE_OVER:
            self._seen.popleft()
        (begun, first), (_, last) = self._seen[0], self._seen[-1]
        return (last - first) / (now - begun) if last > first and now > begun else None


class CatchingUp:
    """The progress of one session's streams from `starts` to `ends`, both topic -> partition -> offset.

    Of a table, `table:NAME`, the offsets are versions.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        positions: Positions,
        starts: Mapping[str, Mapping[int, int]],
        ends: Mapping[str, Mapping[int, int]],
    ) -> None:
        self._streams, self._positions, self._starts, self._ends = streams, positions, starts, ends
        self._rates = {stream.name: Rate() for stream in streams}

    def look(self, now: float) -> list[Standing]:
        """The standing of each stream at `now`, in seconds of a monotonic clock."""
        return [self._standing(stream, now) for stream in self._streams]

    def _standing(self, stream: Stream, now: float) -> Standing:
        from streaming_jobs.table_sources.topics import TABLE, end_names

        position, batch = self._positions(stream.name)
        done = total = 0
        for name in end_names(stream):
            for partition, end in self._ends.get(name, {}).items():
                start = self._starts.get(name, {}).get(partition, 0)
                at = position.get(name.removeprefix(TABLE), {}).get(partition, start)
                total += max(end - start, 0)
                done += max(min(at, end) - start, 0)
        rate = self._rates[stream.name].add(now, done)
        left = (total - done) / rate if rate else (0.0 if done == total else None)
        return Standing(stream.name, done, total, batch, rate, left)


def catching_up(settings: Settings, streams: Sequence[Stream]) -> CatchingUp:
    """The progress of these streams to the present ends of their topics; raises BrokerUnreachable."""
    from streaming_jobs.errors import PreflightRefused
    from streaming_jobs.platform.broker import bootstrap_servers
    from streaming_jobs.runtime.lag import position_on_disk
    from streaming_jobs.sources.topics import Topics
    from streaming_jobs.state import stream_record
    from streaming_jobs.state.stream_folder import StreamFolder
    from streaming_jobs.table_sources.topics import TABLE
    from streaming_jobs.table_sources.versions import TableVersions

    starts: dict[str, Mapping[int, int]] = {}
    ends: dict[str, Mapping[int, int]] = {}
    if names := {topic.name for stream in streams for topic in stream.topics}:
        topics = Topics.of(settings.kafka, bootstrap_servers(settings))
        offsets = {name: topics.offsets(name) for name in names}
        starts |= {name: each.earliest for name, each in offsets.items()}
        ends |= {name: each.latest for name, each in offsets.items()}
    for table in {table.name for stream in streams for table in stream.tables_read}:
        newest = TableVersions(settings.tables / table).newest()
        ends[f"{TABLE}{table}"] = {0: 0 if newest is None else newest + 1}

    def position(stream: str) -> tuple[Mapping[str, Mapping[int, int]], int | None]:
        try:
            record = stream_record.load(settings, stream)
            at = position_on_disk(settings, stream) or {}
            planned = StreamFolder.of(settings, stream).checkpoint(record.generation).last_planned if record else None
        except PreflightRefused:  # the session reports the damage, and fails with it
            return {}, None
        return at, planned

    return CatchingUp(streams, position, starts, ends)


class Bars:
    """Draws on stderr: a bar per stream on a terminal, otherwise a line per stream every `every` seconds."""

    def __init__(self, *, every: float = 5.0) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

        self._every, self._next = every, 0.0
        figures = "batch {task.fields[batch]}, {task.fields[rate]} records/s, lag {task.fields[lag]}"
        texts = [TextColumn(text) for text in ("{task.description}", figures, "{task.fields[left]} left")]
        self._progress = progress_bar(texts[0], BarColumn(), MofNCompleteColumn(), *texts[1:])
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, standings: Sequence[Standing], *, last: bool = False) -> None:
        if self._progress.disable:
            if last or time.monotonic() >= self._next:
                self._next = time.monotonic() + self._every
                for standing in standings:
                    say(str(standing))
            return
        for standing in standings:
            fields: dict[str, Any] = {
                **standing.figures,
                "batch": "-" if standing.batch is None else str(standing.batch),
            }
            if standing.stream not in self._tasks:
                self._tasks[standing.stream] = self._progress.add_task(standing.stream, total=standing.total, **fields)
            self._progress.update(self._tasks[standing.stream], completed=standing.done, **fields)


def lines(streams: Sequence[ObservedStream], feeding: FeederState | None) -> list[str]:
    """The screen as plain lines, for a log: one per stream, and one for the feeder."""
    text = []
    for observed in streams:
        status = observed.status
        if status is None or not observed.live or not status.generation:
            text.append(f"{observed.stream}: {observed.state}")
            continue
        letters = status.totals.dead_letters if status.totals else status.dead_letters  # as in `streams status`
        text.append(
            f"{observed.stream}: {observed.state}, g{status.generation:04d} batch {number(status.batch)},"
            f" {number(status.processed_rows_per_s)} rows/s, lag {number(status.lag_records)},"
            f" watermark {status.watermark or '-'}, {number(letters)} dead letters"
        )
    if feeding is not None:
        text.append(f"feeder: {feeding}")
    return text


def panel(head: Sequence[str], streams: Sequence[ObservedStream], feeding: FeederState | None) -> Group:
    """The screen for a terminal: addresses to open, the streams, the feeder, and notes."""
    from rich.console import Group
    from rich.text import Text

    notes = [Text(note, style="yellow") for observed in streams for note in observed.notes()]
    feeder = [Text(f"feeder  {feeding}")] if feeding is not None else []
    table = make_table(COLUMNS, [observed.row() for observed in streams], right=RIGHT)
    return Group(
        *(Text(line) for line in head),
        Text(),
        table,
        Text(),
        *feeder,
        *notes,
        Text("Ctrl-C ends all of it", style="dim"),
    )


class Screen:
    """Draws on stderr: in place on a terminal, otherwise as lines every `every` seconds."""

    def __init__(self, head: Sequence[str] = (), *, every: float = 10.0) -> None:
        from rich.live import Live

        self._head, self._every, self._next = list(head), every, 0.0
        console = stderr_console()
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
        else:
            for line in self._head:
                say(line)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, streams: Sequence[ObservedStream], feeding: FeederState | None = None) -> None:
        if self._live:
            self._live.update(panel(self._head, streams, feeding), refresh=True)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            for line in lines(streams, feeding):
                say(line)
