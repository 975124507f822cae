"""Every figure that is exported, once: the endpoint, OTLP, the dashboard's test and docs/metrics.md all use `FIGURES`.

A figure takes its samples from an `ScrapedHome`. Labels have few values: streams, tables, row rules, topics, and the
partitions of topics that have at most `MOST_PARTITIONS`; never a batch, an offset or a time. Ages are computed when
they are asked for, so they grow while nothing runs. A figure that is not known has no sample.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import structlog

from orchestration.metrics.scrape import ScrapedHome, ScrapedStream
from streaming_jobs.runtime.code_version import package_version
from streaming_jobs.state.health import LAG_FRESH, NEITHER, Word
from streaming_jobs.state.status import PHASES, State, Status, Totals, moment

log = structlog.get_logger()

PREFIX = "recourse_"
MOST_PARTITIONS = 64
"""Partitions of a topic up to which the lag of each is exported."""
VERDICTS = ("well", "yellow", "red", *NEITHER)
STATES = (*get_args(State), "dead", "silent", *(each for each in NEITHER if each != "stopped"))

Kind = Literal["gauge", "counter"]
Unit = Literal["seconds", "bytes", ""]
Samples = float | None | Mapping[tuple[str, ...], float | None]
"""One value, or values by those labels that follow the stream; None is not known."""


@dataclass(frozen=True)
class Figure:
    """One figure. The counter's name ends with `_total`; `labels` begin with `stream` for a figure of a stream."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    samples: Callable[[ScrapedHome], Iterator[tuple[tuple[str, ...], float]]]

    @property
    def unit(self) -> Unit:
        """The base unit, which the name says."""
        base = self.name.removesuffix("_total")
        return "seconds" if base.endswith("_seconds") else "bytes" if base.endswith("_bytes") else ""


def _known(samples: Samples) -> Iterator[tuple[tuple[str, ...], float]]:
    each = samples if isinstance(samples, Mapping) else {(): samples}
    yield from ((labels, float(value)) for labels, value in each.items() if value is not None)


def _readable(
    name: str, stream: ScrapedStream, of: Callable[[ScrapedStream], Samples]
) -> Sequence[tuple[tuple[str, ...], float]]:
    """The samples of one stream; none if its status has something else there: all others are exported."""
    try:
        return tuple(_known(of(stream)))
    except Exception as error:  # noqa: BLE001 - a file that another version, or another program, has written
        log.info("a figure cannot be read", figure=name, stream=stream.name, reason=repr(error)[:200])
        return ()


def _figure(
    name: str, text: str, of: Callable[[ScrapedHome], Samples], labels: tuple[str, ...] = (), kind: Kind = "gauge"
) -> Figure:
    return Figure(PREFIX + name, kind, text, labels, lambda home: _known(of(home)))


def _of_stream(
    name: str, text: str, of: Callable[[ScrapedStream], Samples], *labels: str, kind: Kind = "gauge"
) -> Figure:
    def samples(home: ScrapedHome) -> Iterator[tuple[tuple[str, ...], float]]:
        for stream in home.streams:
            yield from (((stream.name, *more), value) for more, value in _readable(name, stream, of))

    return Figure(PREFIX + name, kind, text, ("stream", *labels), samples)


def _of_status(
    name: str, text: str, of: Callable[[ScrapedStream, Status], Samples], *labels: str, kind: Kind = "gauge"
) -> Figure:
    """A figure of streams whose status can be read."""
    return _of_stream(
        name, text, lambda stream: None if stream.status is None else of(stream, stream.status), *labels, kind=kind
    )


def _total(name: str, text: str, of: Callable[[Totals], Samples], *labels: str) -> Figure:
    """A count over all sessions."""
    return _of_status(
        f"{name}_total", text, lambda _, s: None if s.totals is None else of(s.totals), *labels, kind="counter"
    )


def _one_of(names: tuple[str, ...], present: set[str]) -> Samples:
    return {(name.replace(" ", "_"),): float(name in present) for name in names}


def _age(stream: ScrapedStream, at: float | None) -> float | None:
    return None if not at else max(stream.at - at, 0.0)


def _sees_ends(stream: ScrapedStream, status: Status) -> bool:
    """True while a driver looks at the ends of the topics: what it saw last is still so."""
    return stream.live and status.lag_at is not None and stream.at - status.lag_at <= LAG_FRESH


def _lag_seconds(stream: ScrapedStream, status: Status) -> float | None:
    """The driver's own figure while it looks at the topics, else the time since it had read everything."""
    if status.lag_at is None or status.read_up_to is None:
        return None
    if _sees_ends(stream, status):
        return status.lag_s
    return max(stream.at - status.read_up_to, 0.0)


def _by_partition(status: Status) -> Samples:
    return {
        (topic, partition): records
        for topic, each in status.lag_partitions.items()
        if len(each) <= MOST_PARTITIONS
        for partition, records in each.items()
    }


def _watermark_delay(stream: ScrapedStream, status: Status) -> float | None:
    at = moment(status.watermark) if status.watermark else None
    return None if at is None else stream.at - at


def _by_rule(totals: Totals) -> Samples:
    names = {name: name.partition(".") for name in totals.broken}
    return {(table, rule): totals.broken[name] for name, (table, _, rule) in names.items()}


def _objectives(status: Status) -> Samples:
    return {(name,): table.fresh_within_s for name, table in status.tables.items()}


FIGURES: tuple[Figure, ...] = (
    # The home.
    _figure(
        "build_info",
        "1; the labels name the version of Recourse and of Python that export the figures.",
        lambda _: {(package_version(), platform.python_version()): 1.0},
        ("version", "python"),
    ),
    _figure("streams", "Streams that have ever run in the home.", lambda home: len(home.streams)),
    _figure("collection_duration_seconds", "Time that reading all files took.", lambda home: home.seconds),
    _figure(
        "collection_age_seconds",
        "Time since all files were read; above a few seconds, reading takes longer than a scrape may.",
        lambda home: home.age,
    ),
    _figure(
        "disk_free_bytes",
        "Free space of the disk of home, state and tables; not of an object store.",
        lambda home: {(name,): free for name, free in home.free.items()},
        ("folder",),
    ),
    _figure(
        "disk_free_objective_bytes",
        "Free space below which a stream is yellow, by quality.free_disk_mb; a fourth of it is red.",
        lambda home: home.free_objective,
    ),
    # Health.
    _of_stream(
        "stream_readable",
        "1 if the status file of the stream could be read, else 0.",
        lambda stream: float(stream.status is not None),
    ),
    _of_stream(
        "stream_verdict",
        "1 for the present verdict, 0 for the others.",
        lambda stream: _one_of(VERDICTS, {stream.verdict}),
        "verdict",
    ),
    _of_stream(
        "stream_state",
        "1 for the present state, 0 for the others.",
        lambda stream: _one_of(STATES, {stream.state}),
        "state",
    ),
    _of_stream(
        "stream_reason",
        "1 for each reason why the stream is red or yellow, 0 for the others.",
        lambda stream: _one_of(get_args(Word), set(stream.reasons)),
        "reason",
    ),
    _of_stream("session_live", "1 if a driver runs the stream, else 0.", lambda stream: float(stream.live)),
    _of_status("heartbeat_age_seconds", "Age of the driver's last sign of life.", lambda o, s: _age(o, s.heartbeat)),
    _of_status(
        "session_start_timestamp_seconds",
        "Time at which the newest session began, since 1970.",
        lambda _, s: s.started_at or None,
    ),
    _of_status(
        "session_continuous",
        "1 if the newest session runs until it is stopped, 0 if it ends when it has read everything (available-now).",
        lambda _, s: float(s.trigger != "available-now"),
    ),
    _of_status(
        "restarts_total", "Restarts of the query within the present session.", lambda _, s: s.restarts, kind="counter"
    ),
    _of_status("failures_in_a_row", "Failures that the stream has not recovered from yet.", lambda _, s: s.failures),
    _of_status(
        "recoveries_total",
        "Recoveries that have been published: generations after the first one.",
        lambda _, s: s.generation - 1 if s.generation else None,
        kind="counter",
    ),
    _of_status(
        "code_info",
        "1; the label is the hash of the code that runs, or ran last.",
        lambda _, s: {(s.code_hash,): 1.0} if s.code_hash else None,
        "code",
    ),
    _of_status(
        "code_on_disk_differs",
        "1 if code or settings on disk are not those that run.",
        lambda o, s: float(s.disk_code_since is not None) if o.live else None,
    ),
    # Lag.
    _of_status("lag_records", "Records between the last batch and the end of the topics.", lambda _, s: s.lag_records),
    _of_status("lag_seconds", "Everything in the topics this long ago has been read.", _lag_seconds),
    _of_status(
        "lag_measured_age_seconds",
        "Time since the end of the topics was last seen: the age of the lag in records.",
        lambda o, s: _age(o, s.lag_at),
    ),
    _of_status(
        "topic_lag_records",
        "Records between the last batch and the end, by topic.",
        lambda _, s: {(topic,): sum(each.values()) for topic, each in s.lag_partitions.items()},
        "topic",
    ),
    _of_status(
        "partition_lag_records",
        f"Records between the last batch and the end, by partition; of topics with at most {MOST_PARTITIONS} of them.",
        lambda _, s: _by_partition(s),
        "topic",
        "partition",
    ),
    _of_status(
        "foreign_transactions_open",
        "Partitions that wait for the end of another program's transaction; while a driver sees their ends.",
        lambda o, s: {
            (topic,): len(s.blocked.get(topic, {})) for topic in {*s.lag_partitions, *s.blocked} if _sees_ends(o, s)
        },
        "topic",
    ),
    _of_status(
        "foreign_transaction_age_seconds",
        "Time for which the oldest of these transactions has been seen open; while a driver sees the ends.",
        lambda o, s: {
            (topic,): _age(o, min(each.values())) for topic, each in s.blocked.items() if each and _sees_ends(o, s)
        },
        "topic",
    ),
    # Batches.
    _of_status("batches_total", "Batches of the present session.", lambda _, s: s.batches, kind="counter"),
    _of_status(
        "batch_phase_seconds_total",
        f"Time of these batches by phase: {', '.join(PHASES)}.",
        lambda _, s: {(phase,): seconds for phase, seconds in s.phase_s.items()},
        "phase",
        kind="counter",
    ),
    _of_status(
        "last_batch_duration_seconds",
        "Duration of the last batch, without the pause after it.",
        lambda _, s: None if s.batch_ms is None else s.batch_ms / 1000,
    ),
    _of_status("last_batch_records", "Records of the last batch.", lambda _, s: s.batch_records),
    _of_status(
        "last_commit_age_seconds", "Time since the last batch was committed.", lambda o, s: _age(o, s.committed_at)
    ),
    _of_status(
        "input_records_per_second",
        "Records that arrived per second, by Spark; while a driver runs.",
        lambda o, s: s.input_rows_per_s if o.live else None,
    ),
    _of_status(
        "processed_records_per_second",
        "Records of the last batch by its duration; while a driver runs.",
        lambda o, s: s.processed_rows_per_s if o.live else None,
    ),
    _total("records", "Records that batches have read, in all sessions.", lambda t: t.records),
    _total(
        "rows_written",
        "Rows that batches have written to the primary table, in all sessions.",
        lambda t: t.rows_written,
    ),
    # State.
    _of_status("watermark_delay_seconds", "Time from the watermark to now; historic data has years.", _watermark_delay),
    _of_status(
        "watermark_ahead_seconds",
        "Time from the newest record's timestamp to a later watermark: it should be 0.",
        lambda _, s: s.watermark_ahead_s if s.watermark else None,
    ),
    _of_status("state_rows", "Rows in the state of Spark's operators.", lambda _, s: s.state_rows),
    _of_status(
        "state_bytes",
        "Memory of the state of Spark's operators.",
        lambda _, s: None if s.state_mb is None else s.state_mb * 2**20,
    ),
    _of_status(
        "state_skew",
        "Keys in the fullest partition of an operator's state, divided by those of an average one.",
        lambda _, s: s.state_skew,
    ),
    # Quality.
    _total("dead_letters", "Records and rows that became dead letters, in all sessions.", lambda t: t.dead_letters),
    _total("late_records", "Records behind the watermark, of batches whose state dropped some.", lambda t: t.late_rows),
    _total("quarantined_rows", "Rows that row rules have set aside, in all sessions.", lambda t: t.quarantined),
    _total(
        "dropped_rows", "Rows that row rules or the error policy have dropped, in all sessions.", lambda t: t.dropped
    ),
    _total("broken_rule_rows", "Rows that broke a row rule, by table and rule.", _by_rule, "table", "rule"),
    # Tables.
    _of_status(
        "table_age_seconds",
        "Age of the newest committed rows of a table.",
        lambda o, s: {(name,): table.seconds(o.at) for name, table in s.tables.items()},
        "table",
    ),
    _of_status(
        "table_fresh_within_seconds",
        "Freshness objective of a table, as its stream declares it.",
        lambda _, s: _objectives(s),
        "table",
    ),
)


def table() -> str:
    """The table of all figures for docs/metrics.md."""
    rows = ["| figure | type | labels | meaning |", "|---|---|---|---|"]
    for each in FIGURES:
        labels = ", ".join(f"`{label}`" for label in each.labels)
        rows.append(f"| `{each.name}` | {each.kind} | {labels} | {each.help} |")
    return "\n".join(rows) + "\n"
