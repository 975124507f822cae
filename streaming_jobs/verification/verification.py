"""Verification of declared streams against a broker, in an order that lets the streams run meanwhile.

First the versions of the tables are read, then the ends of the topics: every record that the versions were made from
lies before these ends. Later records are not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deltalake.exceptions import DeltaError

from streaming_jobs.catalog.archive import is_archive
from streaming_jobs.catalog.truths import Truth
from streaming_jobs.errors import UsageError
from streaming_jobs.platform import table_rows
from streaming_jobs.registry.schemas import StoredSchemas
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.settings import Settings
from streaming_jobs.storage.locations import delta_table
from streaming_jobs.stream import KafkaTopic, Stream
from streaming_jobs.verification.dead_letters import Judge, Refusals
from streaming_jobs.verification.delta_log import versions
from streaming_jobs.verification.examination import VersionGone, still, version_at
from streaming_jobs.verification.lineage import recorded
from streaming_jobs.verification.postgres import compare_postgres
from streaming_jobs.verification.records import LETTERS, Made, refused_rows
from streaming_jobs.verification.state_evidence import ACCEPTED, outputs_of
from streaming_jobs.verification.subject import LATE, QUARANTINED, Comparison, StreamTable, Subject
from streaming_jobs.verification.topic import CommittedReader, CommittedTopic, RawRecord
from streaming_jobs.verification.truths import (
    ReadRecords,
    TableVersion,
    Watermarks,
    compare_truth,
    refused_whole,
    watermarks,
)
from streaming_jobs.verification.verifier import OverallVerdict, StreamVerdict, newest_versions, verify

if TYPE_CHECKING:
    from streaming_jobs.declare.format import Schemas


Told = Callable[[str, int, int], None]
"""Called with progress: the activity, which ends with its unit, the number done, the number in all."""


@dataclass(frozen=True)
class Options:
    """Options of a verification. `until` is a deadline of `time.monotonic` for reading the topics; None: no deadline.

    Without `decode`, records are not decoded: which of them are refused is not compared.
    """

    finished: bool = False
    decode: bool = True
    until: float | None = None


def verify_streams(
    settings: Settings,
    streams: Sequence[Stream],
    truths: Sequence[Truth],
    bootstrap: str,
    options: Options,
    tell: Told = lambda *_: None,
) -> tuple[OverallVerdict, dict[str, CommittedReader]]:
    """The verdict on these streams, and the readers of their topics, for further comparisons.

    Topics of streams that have never been started are read only with `options.finished`.
    """
    begun = [s for s in streams if not s.tables_read and (options.finished or _has_begun(settings, s))]
    subjects = [subject_of(stream) for stream in begun]
    marks = {stream.name: watermarks(settings.state, stream.name) for stream in begun}
    void_before = recorded(settings.state, {name for subject in subjects for name in subject.topics})
    at = newest_versions(subjects, settings.tables)
    readers = _readers(settings, begun, bootstrap, options.until)
    codes = {stream.name: code_version(stream, settings.flows).names for stream in begun}
    schemas = StoredSchemas.of_settings(settings)
    refusals = (
        {stream.name: refusals_of(stream, schemas, codes[stream.name]) for stream in begun} if options.decode else {}
    )
    topics = {name: _read(reader, begun, refusals, tell) for name, reader in readers.items()}
    judged = verify(
        subjects,
        settings.tables,
        topics,
        finished=options.finished,
        at=at,
        state=settings.state,
        refusals=refusals,
        void_before=void_before,
        tell=tell,
    )
    verdicts = []
    for stream in streams:
        verdict = next((v for v in judged.streams if v.stream == stream.name), None)
        if verdict is None:
            known_only = stream.tables_read and _has_begun(settings, stream)
            verdicts.append(of_a_table(stream) if known_only else never_started(stream))
            continue
        verdict = replace(verdict, begun=_has_begun(settings, stream))
        made, code = refusals.get(stream.name), codes[stream.name]
        records = ReadRecords(stream, verdict.coverage, topics, readers, made, code, schemas)
        known = _Known(settings, verdict, records, marks[stream.name])
        mine = [truth for truth in truths if truth.table in {s.name for s in stream.sinks.values()}]
        more = []
        for number, truth in enumerate(mine):
            tell(f"comparing stream {stream.name} with the truth, tables", number, len(mine))
            more.append(known.compare(truth))
        in_database = compare_postgres(settings, stream, verdict.coverage)
        comparisons = (*verdict.comparisons, *_without_truth(stream, truths), *more, *in_database)
        verdicts.append(replace(verdict, comparisons=comparisons))
    return OverallVerdict(judged.records, tuple(verdicts)), readers


@dataclass(frozen=True)
class _Known:
    """The facts about one stream for the comparison of its tables with truths."""

    settings: Settings
    verdict: StreamVerdict
    records: ReadRecords
    marks: Watermarks

    def compare(self, truth: Truth) -> Comparison:
        if truth.table in self.verdict.accepted:
            return Comparison(truth.table, "truth", "not compared", ACCEPTED)
        path, position = self.settings.tables / truth.table, self.verdict.position
        try:
            version = self._version(truth.table)
            refused, unheld = self._refused(truth.table, version)
        except VersionGone as gone:
            return Comparison(truth.table, "truth", "unproved", str(gone))
        except (DeltaError, OSError) as error:
            return Comparison(truth.table, "truth", "wrong", f"it cannot be read: {str(error)[:300]}")
        watermark = self.marks.get(position) if position is not None else None
        return compare_truth(truth, self.records, TableVersion(path, version, watermark, refused, unheld))

    def _version(self, table: str) -> int | None:
        path = self.settings.tables / table
        if table == self.records.stream.primary.name:
            return still(path, self.verdict.version)
        return version_at(path, self.verdict.position)

    def _refused(self, table: str, version: int | None) -> tuple[dict[str, frozenset[int]], int]:
        """By topic the places of records without a row in a table, and the number of further refused rows.

        A record whose only row was refused is one of them; one of several rows may have others in the table.
        """
        stream = self.records.stream
        path = self.settings.tables / stream.dead_letters
        at = version_at(path, self.verdict.position)
        if at is None or version is None:
            return {}, 0
        places = {t: set(known) for t, known in refused_whole(table_rows.rows(path, at, LETTERS)).items()}
        recorded = outputs_of(self.settings.state, stream.name)
        made = Made.of(recorded, self.verdict.coverage.entries, table)
        topic, *others = (source.name for source in stream.sources.values())
        columns = {c.name for c in delta_table(self.settings.tables / table, version).schema().fields}
        unheld = 0
        for row in refused_rows(path, at, topic, None if others else made.position):
            if row.columns <= columns:
                if row.topic is not None and row.place is not None and made.outputs and made.one_row_at_most:
                    places.setdefault(row.topic, set()).add(row.place)
                else:
                    unheld += 1
        return {t: frozenset(known) for t, known in places.items()}, unheld


def never_started(stream: Stream) -> StreamVerdict:
    """The verdict on a stream that has neither state nor tables."""
    return _not_compared(stream, "the stream has never been started", begun=False)


def of_a_table(stream: Stream) -> StreamVerdict:
    """The verdict on a stream that reads a table: its rows are not compared."""
    read = ", ".join(table.name for table in stream.tables_read)
    text = f"the stream reads table {read}, and rows are compared with records of topics only"
    return _not_compared(stream, text, begun=True)


def _not_compared(stream: Stream, text: str, *, begun: bool) -> StreamVerdict:
    comparison = Comparison(stream.primary.name, "rows", "not compared", text)
    return StreamVerdict(stream.name, stream.primary.name, comparisons=(comparison,), begun=begun)


def _without_truth(stream: Stream, truths: Sequence[Truth]) -> list[Comparison]:
    known = {truth.table for truth in truths}
    text = "no truth is declared for it (`@truth`); --recompute compares with the stream's own function"
    if stream.batches_only:
        text = "it has the ledger of the batches, and where they lie in the topics that the stream writes"
    return [
        Comparison(sink.name, "values", "not compared", text)
        for sink in stream.sinks.values()
        if sink.name not in known
    ]


def _has_begun(settings: Settings, stream: Stream) -> bool:
    state = settings.state / stream.name / "stream.json"
    return state.exists() or bool(versions(settings.tables / stream.primary.name))


def _readers(
    settings: Settings, streams: Sequence[Stream], bootstrap: str, until: float | None
) -> dict[str, CommittedReader]:
    """A reader of each topic that exists; the verifier reports a missing topic for each of its streams."""
    readers = {}
    for name in dict.fromkeys(topic.name for stream in streams for topic in stream.topics):
        try:
            readers[name] = CommittedReader.at(settings.kafka, bootstrap, name, until=until)
        except UsageError:
            continue
    return readers


def _read(
    reader: CommittedReader, streams: Sequence[Stream], refusals: dict[str, Refusals], tell: Told
) -> CommittedTopic:
    """Read a topic once for all streams; streams that declare it alike share the refusals of its format."""
    judges: list[tuple[KafkaTopic, Refusals]] = []
    for stream in streams:
        mine = refusals.get(stream.name)
        source = next((topic for topic in stream.topics if topic.name == reader.name), None)
        if mine is None or source is None:
            continue
        alike = next(
            (r for s, r in judges if (s.records, s.tombstones) == (source.records, source.tombstones)),
            None,
        )
        if alike is None:
            judges.append((source, mine))
            alike = mine
        mine.found[reader.name] = alike.found.setdefault(reader.name, {})
    total, done = sum(span.offsets for span in reader.whole), 0

    def take(records: Sequence[RawRecord]) -> None:
        for _, judge in judges:
            judge.take(records)

    def progress(offsets: int) -> None:
        nonlocal done
        done += offsets
        tell(f"reading topic {reader.name}, offsets", done, total)

    return reader.content(take=take, progress=progress)


def subject_of(stream: Stream) -> Subject:
    first, *others = (topic.name for topic in stream.sources.values())
    aside = stream.quarantines
    tables = [
        StreamTable(sink.name, sink.name if number else "written", tuple(sink.keys), aside.get(sink.name, ""))
        for number, sink in enumerate((stream.primary, *stream.secondary))
    ]
    tables += [StreamTable(table.name, "", tuple(table.keys)) for table in stream.deletes]
    tables += [StreamTable(name, f"{QUARANTINED}{table}") for table, name in aside.items()]
    tables += [StreamTable(name, f"{LATE}{table}") for table, name in stream.late_tables.items()]
    tables.append(StreamTable(stream.dead_letters, "dead_letters"))
    return Subject(
        stream=stream.name,
        table=stream.primary.name,
        topic=first,
        others=tuple(others),
        tables=tuple(tables),
        reads_void=is_archive(stream),
    )


def refusals_of(stream: Stream, schemas: Schemas, code: frozenset[str] = frozenset()) -> Refusals:
    """The refusals of the stream's formats, empty until records are taken; `code` is the code that declares them."""
    topics = [topic.bound(schemas) for topic in stream.topics]
    return Refusals(
        judges={topic.name: _judge(topic) for topic in topics},
        keeps=frozenset(topic.name for topic in topics if topic.tombstones == "keep"),
        reasons=frozenset(reason for topic in topics for reason in getattr(topic.records, "reasons", ())),
        code=code,
        drops=stream.errors.decode == "drop",
    )


def _judge(topic: KafkaTopic) -> Judge:
    """What gives the reasons why the topic's format refuses records."""
    reader, frame = topic.records.reader([]), topic.header_frame  # of no columns

    def judge(records: Sequence[RawRecord]) -> dict[int, str]:
        refused = reader.read([record.framed(frame) for record in records]).refused
        return {number: refusal.reason for number, refusal in refused.items()}

    return judge
