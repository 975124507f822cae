"""Records that were set aside, run through the stream's code of today, on folders of their own.

The run is an ordinary query of the stream, from its first batch to the end of these records: decoder, function, row
rules and error policy are those of the stream. Its tables show what becomes of the records; nobody else sees them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprocessing.redrive.records import by_topic
from reprocessing.redrive.refusals import check_plan
from reprocessing.trace import place_columns
from streaming_jobs.declare.error_policy import LAYERS
from streaming_jobs.errors import TransientError
from streaming_jobs.ledger.entry import DROPPED, LedgerEntry
from streaming_jobs.platform.failures import classify
from streaming_jobs.platform.table_rows import rows
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.runtime.batch_hooks import BatchReport
from streaming_jobs.runtime.sliceable import Sliceable
from streaming_jobs.runtime.stream_queries import QueryHooks, SparkQueries, ended_alone
from streaming_jobs.runtime.stream_sinks import DiscardedSinks
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.redriven import PLACE, Kind, Outcome, Place
from streaming_jobs.sinks.tables import open_tables
from streaming_jobs.sources.connection import Connection, client_file, remove_client_file
from streaming_jobs.sources.kafka import KafkaSource
from streaming_jobs.sources.kept_topics import KeptClients, KeptRecord, KeptTopics
from streaming_jobs.sources.record_blocks import RECORD
from streaming_jobs.state.set_aside import REASON
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.archives import Archives

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ENDS_WITHIN = 3600.0
"""Seconds that the run of one redrive may take."""
_STOPS_WITHIN = 60.0


@dataclass
class Made:
    """What the code of today makes of the records: rows by table, with those of quarantines and dead letters.

    `dropped` are rows by table that rules or the error policy have dropped. `columns` has by table those of the place
    of a row's record, where the function passes it on. `times`, for slices: by the field of event time and by place
    the times of the records that the format takes.
    """

    tables: dict[str, pa.Table] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    columns: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    times: dict[str, dict[Place, datetime | None]] = field(default_factory=dict)

    def with_row(self, tables: Sequence[str]) -> set[tuple[int, int]] | None:
        """Partition and offset of the records of these tables' rows; None if not all of the rows name their record."""
        found: set[tuple[int, int]] = set()
        for name in tables:
            if name in self.tables:
                if name not in self.columns:
                    return None
                found |= set(zip(*(self.tables[name][each].to_pylist() for each in self.columns[name]), strict=True))
        return found

    def reasons(self, letters: str) -> set[str]:
        """The reasons of the dead letters."""
        return set(self.tables[letters]["reason"].to_pylist()) if letters in self.tables else set()

    def places(self, table: str, kind: Kind) -> set[Place]:
        """The places of the records in a table of what was set aside."""
        if table not in self.tables:
            return set()
        topics, partitions, offsets = (self.tables[table][name].to_pylist() for name in PLACE[kind])
        return set(zip(topics, partitions, offsets, strict=True))


def run(
    settings: Settings,
    stream: Stream,
    record: StreamRecord,
    records: Mapping[Place, KeptRecord],
    spark: SparkSession,
    folder: Path,
    *,
    of_rows: bool,
    sliced: Sequence[Sliceable] = (),
) -> Made:
    """Run the records through the stream's code, on folders below `folder`, which is empty.

    With `sliced` tables, a record that fails is a dead letter of the run whatever the stream's error policy says.
    Raises UsageError for a plan that cannot be redriven, and what the stream's batches raise.
    """
    target = _settings(settings, stream, folder)
    ids = {topic.name: topic.topic_id for topic in record.topics}
    topics = KeptTopics(by_topic(records), {topic.name: ids.get(topic.name, "") for topic in stream.topics})
    client = client_file(settings, "")
    connection = Connection(client, topics, topics, KeptClients.save(topics, folder / "records"))
    entries: dict[int, LedgerEntry] = {}
    pipelines: list[BatchPipeline] = []

    def built(pipeline: BatchPipeline) -> None:
        check_plan(stream, pipeline.traits, of_rows=of_rows, in_slices=bool(sliced))
        pipelines.append(pipeline)

    def done(report: BatchReport) -> None:
        entries[report.entry.batch] = report.entry

    lenient = _setting_aside(stream, drops=not sliced)
    try:
        queries = SparkQueries(target, connection=connection, archives=Archives(settings), external=DiscardedSinks())
        hooks = QueryHooks("available-now", threading.Event(), built, done)
        launched = queries.launch(spark, lenient, queries.preflight(lenient).snapshot, hooks)
        deadline = time.monotonic() + ENDS_WITHIN
        if not ended_alone(launched.query, lambda: time.monotonic() < deadline, _STOPS_WITHIN):
            raise TransientError(f"the redrive did not end within {ENDS_WITHIN:g} s", "choose fewer records")
        failure = pipelines[0].failure or launched.query.exception()
        if failure is not None:
            raise classify(failure) from failure
        made = _made(target, lenient, list(entries.values()))
        for each in sliced:
            if each.event_time not in made.times:
                made.times[each.event_time] = _event_times(spark, each, connection)
    finally:
        remove_client_file(client)
    return made


def _event_times(spark: SparkSession, sliced: Sliceable, connection: Connection) -> dict[Place, datetime | None]:
    """The event times of the records that the format of today takes."""
    from pyspark.sql import functions as F

    topic = sliced.topic
    assert connection.clients is not None, "a redrive has the records in a file"
    source = KafkaSource(sliced.parameter, topic, connection.client, topic.delay, clients=connection.clients)
    bounds = connection.topics.offsets(topic.name)
    good = source.judged(spark, bounds.earliest, bounds.latest).where(~F.col("_bad"))
    micros = F.unix_micros(F.col(RECORD)[sliced.event_time].cast("timestamp"))
    return {
        (topic.name, row[0], row[1]): None if row[2] is None else _EPOCH + timedelta(microseconds=row[2])
        for row in good.select("partition", "offset", micros).collect()
    }


def _settings(settings: Settings, stream: Stream, folder: Path) -> Settings:
    """Those of a replay, with batches that take all records, however far apart their offsets are."""
    target = settings.for_replay(
        stream.name,
        folder / "state",
        folder / "tables",
        start="earliest",
        max_offsets_per_trigger=1 << 40,
        max_batch_mb=1 << 20,
    )
    return target.model_copy(update={"table": target.table.model_copy(update={"compact_after_files": 0})})


def _setting_aside(stream: Stream, *, drops: bool) -> Stream:
    """The stream with an error policy that sets aside again what would stop it; what it `drops`, if that is wanted.

    The default budget holds, of records on which the function raises: each costs some runs of the function.
    """
    policy = stream.errors
    actions: dict[str, Any] = {
        layer: "drop" if drops and getattr(policy, layer) == "drop" else "dead_letter" for layer in LAYERS
    }
    return replace(stream, errors=replace(policy, **actions, budget=None))


def _made(target: Settings, stream: Stream, entries: Sequence[LedgerEntry]) -> Made:
    made = Made(columns=place_columns(target, stream))
    for name, table in open_tables(target, stream).items():
        content = rows(target.tables / name)
        if content.num_rows:
            made.tables[name] = content.select([c for c in table.schema.fieldNames() if c in content.column_names])
    for entry in entries:
        for name, number in entry.rows.items():
            if name.startswith(DROPPED) and number:
                of = name.removeprefix(DROPPED)
                made.dropped[of] = made.dropped.get(of, 0) + number
    return made


def outcomes(stream: Stream, kind: Kind, of: str, made: Made, places: Sequence[Place]) -> dict[Place, Outcome]:
    """What became of each record. `of` is the table whose quarantine is redriven.

    Where the rows of a table name their records, each of the records is known; otherwise whether all of them have one.
    """
    dead = made.places(stream.dead_letters, "dead letters")
    tables = [of] if kind == "quarantine" else [sink.name for sink in stream.sinks.values()]
    aside = {p for t in tables if t in stream.quarantines for p in made.places(stream.quarantines[t], "quarantine")}
    unnamed = sum(
        made.tables[name].num_rows
        for name in (stream.quarantines[t] for t in tables if t in stream.quarantines)
        if name in made.tables and None in {p[2] for p in made.places(name, "quarantine")}
    )
    found: dict[Place, Outcome] = {place: "dead again" for place in places if place in dead}
    found |= {place: "quarantined" for place in places if place in aside and place not in dead}
    rest = [place for place in places if place not in found]
    written = sum(made.tables[name].num_rows for name in tables if name in made.tables)
    dropped = sum(made.dropped.get(name, 0) for name in tables)
    named = made.with_row(tables)
    if named is not None:
        found |= {place: "row" for place in rest if place[1:] in named}
    elif len(tables) == 1 and not dropped and not unnamed and written == len(rest):
        found |= dict.fromkeys(rest, "row")
    without = [place for place in rest if place not in found]
    if named is None or unnamed or dropped not in (0, len(without)):
        return found | dict.fromkeys(without, "redriven")
    return found | dict.fromkeys(without, "dropped" if dropped else "no row")


def slice_outcomes(stream: Stream, made: Made, places: Sequence[Place]) -> dict[Place, Outcome]:
    """What became of each record whose slices are rebuilt; those that the error policy drops are dead in `made`."""
    found: dict[Place, Outcome] = dict.fromkeys(places, "rebuilt")
    if stream.dead_letters in made.tables:
        for letter in made.tables[stream.dead_letters].to_pylist():
            place = letter["topic"], letter["partition"], letter["offset"]
            if place in found:
                action = stream.errors.function if letter["reason"] == REASON else stream.errors.decode
                found[place] = "dropped" if action == "drop" else "dead again"
    return found
