"""OpenLineage events of streams, from what sessions and ledgers have noted.

A session is a run of the job that its stream is: START, then a RUNNING event for the batches since the last look, then
COMPLETE, FAIL, or ABORT for a session that was killed. A look reads files only, so no batch waits for a receiver, and a
receiver that was down gets all of it later: what the cursor has not passed is made again, with the same run ids.

Inputs are topics, with the number of records, and tables that the stream reads. Outputs are topics that it writes, and
its tables, with columns, rows and the version that the last of the batches made. The facet `recourse_batches` of a run
has offsets, versions and the code of these batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import attr
import structlog
from openlineage.client import OpenLineageClient, event_v2
from openlineage.client.facet_v2 import (
    RunFacet,
    dataset_version_dataset,
    documentation_job,
    error_message_run,
    input_statistics_input_dataset,
    job_type_job,
    output_statistics_output_dataset,
    processing_engine_run,
    schema_dataset,
)
from openlineage.client.uuid import generate_static_uuid

from reprocessing.timeline.timeline import BatchPoint, read_batches
from streaming_jobs.declare.lookup import Lookup
from streaming_jobs.declare.names import kafka_name
from streaming_jobs.settings import Settings
from streaming_jobs.state.stream_history import SessionEvent, session_events
from streaming_jobs.storage.locations import StorePath, delta_table
from streaming_jobs.stream import KafkaTopic, Stream

if TYPE_CHECKING:
    from streaming_jobs.storage.locations import Location

log = structlog.get_logger()

PRODUCER = "https://recourse-streams.invalid/0.1"
_ENDS_AND_STARTS = ("started", "stopped", "failed")
MOST = 100
"""Events of one look at a stream; the next look goes on."""
LOOK_TAKES = 30.0
"""Seconds after which a look sends no further event: Dagster gives a tick a minute."""
_PASSING = (401, 403, 404, 408, 425, 429)
"""Answers that are about the receiver or the key, not about the event."""


@attr.define(kw_only=True)
class Batches(RunFacet):
    """The batches `first` to `last` of one generation and one version of the code.

    `offsets`: topic -> partition -> first offset, and the one after the last. `versions`: table -> Delta version.
    """

    generation: int
    first: int
    last: int
    code: str
    offsets: dict[str, dict[str, tuple[int, int]]]
    versions: dict[str, int]


@dataclass(frozen=True)
class Position:
    """How far a stream's events have been taken: times of the last session event and batch, seconds since 1970."""

    session_at: float = 0.0
    batch_at: float = 0.0


@dataclass(frozen=True)
class Lineage:
    """The events of one stream."""

    settings: Settings
    stream: Stream
    _columns: dict[str, list[tuple[str, str]]] = field(default_factory=dict, repr=False)
    """Of the tables, as this look found them."""

    def beginning(self) -> Position:
        """The position before the newest session, where a first look begins."""
        started = [event.at for event in session_events(self.settings, self.stream.name) if event.what == "started"]
        return Position(started[-1] - 0.001, started[-1]) if started else Position()

    def since(self, at: Position) -> Iterator[tuple[event_v2.RunEvent, Position]]:
        """The events after a position, in order, each with the position behind it."""
        noted = [event for event in session_events(self.settings, self.stream.name) if event.what in _ENDS_AND_STARTS]
        read = read_batches(self.settings, self.stream.name, at.batch_at).batches
        batches = [batch for batch in read if batch.at > at.batch_at and not batch.replay]
        before = [event for event in noted if event.at <= at.session_at]
        run = next((event for event in reversed(before) if event.what == "started"), None)
        runs = bool(before) and before[-1].what == "started"
        pending: list[BatchPoint] = []
        later = [event for event in noted if event.at > at.session_at]
        merged: list[BatchPoint | SessionEvent] = sorted([*batches, *later], key=attrgetter("at"))
        for item in merged:
            if isinstance(item, BatchPoint):
                pending.append(item)
                continue
            for made, behind in self._batches(run, pending, at):
                at = behind
                yield made, at
            pending = []
            if item.what == "started":
                if runs and run is not None:  # its end was noted by nobody
                    yield self._event(event_v2.RunState.ABORT, run, item.at), at
                run, runs = item, True
            at = Position(item.at, at.batch_at)
            if run is not None and (item.what == "started" or runs):
                yield self._of_session(item, run), at
            runs = item.what == "started"
        yield from self._batches(run, pending, at)

    def _batches(
        self, run: SessionEvent | None, batches: Sequence[BatchPoint], at: Position
    ) -> Iterator[tuple[event_v2.RunEvent, Position]]:
        """The events of batches of a run; batches from before the first known session have none."""
        if run is None:
            return
        for group in _groups(batches):
            yield self._running(run, group), Position(at.session_at, group[-1].at)

    def _of_session(self, event: SessionEvent, run: SessionEvent) -> event_v2.RunEvent:
        if event.what == "failed":
            error = error_message_run.ErrorMessageRunFacet(event.reason or "failed", "PYTHON", producer=PRODUCER)
            return self._event(event_v2.RunState.FAIL, run, event.at, errorMessage=error)
        state = event_v2.RunState.START if event.what == "started" else event_v2.RunState.COMPLETE
        return self._event(state, run, event.at)

    def _running(self, run: SessionEvent, group: Sequence[BatchPoint]) -> event_v2.RunEvent:
        first, last = group[0], group[-1]
        offsets: dict[str, dict[str, tuple[int, int]]] = {}
        versions: dict[str, int] = {}
        for batch in group:
            versions.update(batch.line.value()["versions"])
            for topic, each in batch.offsets.items():
                known = offsets.setdefault(topic, {})
                for partition, end in each["end"].items():
                    begin = known[partition][0] if partition in known else each["start"].get(partition, 0)
                    known[partition] = (begin, end)
        facet = Batches(
            generation=last.generation, first=first.batch, last=last.batch, code=last.code, offsets=offsets,
            versions=versions, producer=PRODUCER,
        )  # fmt: skip
        records = {topic: sum(end - begin for begin, end in of.values()) for topic, of in offsets.items()}
        rows = {self.stream.primary.name: sum(batch.rows for batch in group)} if not self.stream.batches_only else {}
        state = event_v2.RunState.RUNNING
        return self._event(state, run, last.at, records, rows, versions, recourse_batches=facet)

    def _event(
        self,
        state: event_v2.RunState,
        run: SessionEvent,
        at: float,
        records: dict[str, int] | None = None,
        rows: dict[str, int] | None = None,
        versions: dict[str, int] | None = None,
        **facets: Any,
    ) -> event_v2.RunEvent:
        began = datetime.fromtimestamp(run.at, UTC)
        name = f"{self.settings.home}\n{self.stream.name}\n{run.pid}"
        engine = processing_engine_run.ProcessingEngineRunFacet(version("pyspark"), "spark", producer=PRODUCER)
        return event_v2.RunEvent(
            eventType=state,
            eventTime=datetime.fromtimestamp(at, UTC).isoformat(),
            run=event_v2.Run(str(generate_static_uuid(began, name.encode())), {"processing_engine": engine, **facets}),
            job=self._job,
            inputs=[
                *(self._topic(topic, records or {}) for topic in self.stream.topics),
                *(self._table_read(table.name) for table in self.stream.tables_read),
                *(self._looked_up(lookup) for lookup in self.stream.lookups.values()),
            ],
            outputs=[
                *(self._table(name, rows or {}, versions or {}) for name in self.stream.table_names),
                *(event_v2.OutputDataset(*self._dataset(sink.name)) for sink in self.stream.topic_sinks.values()),
                *(self._postgres(table.name) for table in self.stream.postgres_tables.values()),
            ],
            producer=PRODUCER,
        )

    @cached_property
    def _job(self) -> event_v2.Job:
        kind = job_type_job.JobTypeJobFacet("STREAMING", "RECOURSE", "STREAM", producer=PRODUCER)
        text = self.stream.description or self.stream.name
        words = documentation_job.DocumentationJobFacet(text, producer=PRODUCER)
        return event_v2.Job(
            self.settings.lineage.namespace, self.stream.name, {"jobType": kind, "documentation": words}
        )

    def _dataset(self, topic: str) -> tuple[str, str]:
        """Namespace and name of a topic."""
        servers = self.settings.kafka.of(topic).bootstrap_servers.split(",")[0].strip() or "embedded"
        return f"kafka://{servers}", kafka_name(topic)

    def _postgres(self, table: str) -> event_v2.OutputDataset:
        """By the names of OpenLineage: the server, then database, schema and table."""
        postgres = self.settings.postgres
        place = urlsplit(postgres.url)
        server = f"postgres://{place.hostname or 'localhost'}:{place.port or 5432}"
        name = f"{place.path.strip('/') or place.username}.{postgres.database_schema}.{table}"
        return event_v2.OutputDataset(server, name)

    def _topic(self, topic: KafkaTopic, records: dict[str, int]) -> event_v2.InputDataset:
        name = topic.name
        columns = [(field.name, field.dataType.simpleString()) for field in topic.value.schema.fields]
        read: dict[str, Any] = {}
        if name in records:
            read["inputStatistics"] = input_statistics_input_dataset.InputStatisticsInputDatasetFacet(
                rowCount=records[name], producer=PRODUCER
            )
        cluster, name = self._dataset(name)
        return event_v2.InputDataset(
            namespace=cluster, name=name, facets={"schema": _schema(columns)}, inputFacets=read
        )

    def _table_read(self, name: str) -> event_v2.InputDataset:
        namespace, place = _named(self.settings.tables / name)
        return event_v2.InputDataset(namespace=namespace, name=place, facets=self._schema_of(name))

    def _looked_up(self, lookup: Lookup) -> event_v2.InputDataset:
        if lookup.path is None:
            return self._table_read(lookup.name)
        namespace, place = _named(self.settings.location(lookup.path))
        columns = [(field.name, field.dataType.simpleString()) for field in lookup.columns.fields]
        return event_v2.InputDataset(namespace=namespace, name=place, facets={"schema": _schema(columns)})

    def _schema_of(self, table: str) -> dict[str, Any]:
        if table not in self._columns:
            self._columns[table] = _columns(self.settings.tables / table)
        columns = self._columns[table]
        return {"schema": _schema(columns)} if columns else {}

    def _table(self, name: str, rows: dict[str, int], versions: dict[str, int]) -> event_v2.OutputDataset:
        facets = self._schema_of(name)
        if name in versions:
            number = str(versions[name])
            facets["version"] = dataset_version_dataset.DatasetVersionDatasetFacet(number, producer=PRODUCER)
        written: dict[str, Any] = {}
        if name in rows:
            written["outputStatistics"] = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
                rowCount=rows[name], producer=PRODUCER
            )
        namespace, place = _named(self.settings.tables / name)
        return event_v2.OutputDataset(namespace=namespace, name=place, facets=facets, outputFacets=written)


def client(settings: Settings) -> OpenLineageClient:
    """The client of the receiver that the settings name; each request has a time limit, and is tried twice."""
    key = settings.lineage.api_key.get_secret_value()
    transport: dict[str, Any] = {"type": "http", "url": settings.lineage.url, "timeout": 5, "retry": {"total": 1}}
    if key:
        transport["auth"] = {"type": "api_key", "apiKey": key}
    return OpenLineageClient(config={"transport": transport})


@dataclass
class Sent:
    """What a look sent; `refused` by the receiver, and why it ended before all was sent."""

    events: int = 0
    refused: int = 0
    ended: str = ""


def send(
    settings: Settings,
    streams: Iterable[Stream],
    taken: dict[str, Position],
    emit: Callable[[event_v2.RunEvent], object],
    seconds: float = LOOK_TAKES,
) -> Sent:
    """Send the events after the positions in `taken`, and move these behind each that was taken or refused.

    An event that the receiver calls wrong (HTTP 4xx) is logged and passed over: repeated, it would hold up all others.
    Any other failure, and the end of `seconds`, ends the look; the next one begins with the event that was not sent.
    """
    sent, deadline = Sent(), time.monotonic() + seconds
    for stream in streams:
        lineage = Lineage(settings, stream)
        at = taken.setdefault(stream.name, lineage.beginning())
        for event, position in islice(lineage.since(at), MOST):
            if time.monotonic() > deadline:
                sent.ended = "the time of a look is over"
                return sent
            try:
                emit(event)
                sent.events += 1
            except OSError as error:  # all that the HTTP library raises; its texts may quote the address
                status = getattr(getattr(error, "response", None), "status_code", 0)
                if not 400 <= status < 500 or status in _PASSING:
                    sent.ended = f"the receiver took no more: {type(error).__name__} {status or ''}".rstrip()
                    return sent
                log.warning("a lineage event was refused", stream=stream.name, status=status)
                sent.refused += 1
            taken[stream.name] = position
    return sent


def _groups(batches: Sequence[BatchPoint]) -> Iterator[list[BatchPoint]]:
    """Consecutive batches of one generation and one version of the code."""
    group: list[BatchPoint] = []
    for batch in batches:
        if group and (group[-1].generation, group[-1].code) != (batch.generation, batch.code):
            yield group
            group = []
        group.append(batch)
    if group:
        yield group


def _schema(columns: Sequence[tuple[str, str]]) -> schema_dataset.SchemaDatasetFacet:
    fields = [schema_dataset.SchemaDatasetFacetFields(name, kind) for name, kind in columns]
    return schema_dataset.SchemaDatasetFacet(fields, producer=PRODUCER)


def _columns(location: Location) -> list[tuple[str, str]]:
    from deltalake.exceptions import TableNotFoundError

    try:
        fields = delta_table(location).schema().fields
    except TableNotFoundError:
        return []
    return [(field.name, getattr(field.type, "type", str(field.type))) for field in fields]


def _named(location: Location) -> tuple[str, str]:
    """Namespace and name of a dataset, as the specification's naming page has them."""
    if isinstance(location, StorePath):
        scheme, _, rest = location.url.partition("://")
        bucket, _, key = rest.partition("/")
        return f"{scheme}://{bucket}", key
    return "file", str(location)
