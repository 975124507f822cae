"""The stream's own function run once more, as a batch query over everything that the stream has read. Needs Spark.

This finds errors of incremental processing: lost, doubled or mixed-up rows, lost state. It shares function, decoding
and order of upserts with the code that wrote the rows, so it does not find an error in these; that takes a truth of the
user's own.

| table | compared |
|---|---|
| append, no state   | every row equal |
| upsert             | every row equal; running aggregates as they are over all records |
| append, with state | every row of the table is one of those computed; rows that are not there yet are not compared |

Only rows that the present code wrote can be compared with it. Where other code wrote some batches, only tables of
appended rows that name their record, of streams without state, are compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from streaming_jobs.declare.rules import RowRules
from streaming_jobs.platform import table_rows
from streaming_jobs.platform.failures import larger_than_the_driver_takes
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.runtime.spark_plan import analysed
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.fitting import fitted
from streaming_jobs.sinks.delta.pending_writes import ArrowAppend, ArrowMerge
from streaming_jobs.sinks.delta.sink import DeltaSink, open_sink
from streaming_jobs.sinks.delta.upsert_order import DELETE_COLUMN
from streaming_jobs.sinks.delta.writers import prepare_write
from streaming_jobs.sources.connection import client_file, remove_client_file
from streaming_jobs.sources.kafka import KafkaSource
from streaming_jobs.state.set_aside import of_letters
from streaming_jobs.stream import KafkaTopic, Stream
from streaming_jobs.text.spelling import counted
from streaming_jobs.verification.examination import VersionGone, still, version_at
from streaming_jobs.verification.lineage import Coverage, path
from streaming_jobs.verification.offset_ranges import Span, merged, packed, within
from streaming_jobs.verification.state_evidence import ACCEPTED, PlanOutput, StateEvidence
from streaming_jobs.verification.subject import DROPPED, Comparison, ComparisonOutcome
from streaming_jobs.verification.topic import CommittedReader
from streaming_jobs.verification.truths import compare_rows, differing, too_late
from streaming_jobs.verification.verifier import StreamVerdict

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_WHAT = "recomputed"
_TOLERANCE = 1e-9
"""Relative tolerance of floats: sums depend on the order of their parts."""
_STATEFUL = re.compile(
    r"^[\s:+|-]*(Aggregate|Deduplicate\w*|FlatMapGroups\w*|TransformWithState\w*|SessionWindow)\b", re.M
)


def recompute(
    settings: Settings,
    stream: Stream,
    spark: SparkSession,
    bootstrap: str,
    verdict: StreamVerdict,
    readers: Mapping[str, CommittedReader],
) -> list[Comparison]:
    """Compare every declared table of a stream with the rows that its function makes of the records read so far."""

    def each(verdict: ComparisonOutcome, text: str) -> list[Comparison]:
        return [Comparison(sink.name, _WHAT, verdict, text) for sink in stream.sinks.values()]

    if stream.tables_read:
        return each("not compared", "the stream reads a table, and only records of topics are computed again")
    if stream.lookups:
        return each("not compared", "the stream looks up a table, at a version for each batch")
    names = {name for entry in verdict.coverage.entries for name in entry.rows}
    if stream.errors.function == "drop" and any(name.startswith(DROPPED) for name in names):
        return each("not compared", "records were dropped, and the function may raise on some of them")
    if verdict.version < 0 or not verdict.coverage.spans:
        return each("not compared", "the stream has not read anything yet")
    written = _Written.of(settings, stream, verdict.coverage)
    spans = list(merged(written.spans))
    if not spans:
        return each("not compared", written.others)
    for span in spans:
        low = readers[span.topic].low.get(span.partition, 0) if span.topic in readers else None
        if low is None or span.start < low:
            return each("unproved", f"topic {span.topic} no longer holds what the rows were made from")
    frames = {}
    client = client_file(settings, bootstrap)
    try:
        for parameter, topic in stream.sources.items():
            assert isinstance(topic, KafkaTopic)  # `verify` leaves the others out
            aside = of_letters(settings.tables / stream.dead_letters, topic.name)
            source = KafkaSource(parameter, topic, client, topic.delay, aside=aside)
            frames[parameter] = _read(source, spark, [s for s in spans if s.topic == topic.name], readers[topic.name])
        outputs = stream.outputs(**frames)
        tables = {name: frame for name, frame in outputs.items() if name in stream.sinks}
        made = [_table(settings, stream, name, frame, verdict, written) for name, frame in tables.items()]
        return made or each("not compared", "it says where the batches lie in the topics that the stream writes")
    finally:
        remove_client_file(client)


@dataclass(frozen=True)
class _Written:
    """The ranges (`spans`) that the present code has read; `others` names in words the batches of other code, if any.

    `places` has by table the columns that hold a record's partition and offset, the same ones in all rows.
    """

    spans: list[Span]
    others: str = ""
    places: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings, stream: Stream, coverage: Coverage) -> _Written:
        now = code_version(stream, settings.flows).names
        if not (others := coverage.others(now)):
            return cls(coverage.spans)
        beside = StateEvidence.read(settings.state, stream.name)
        outputs = beside.outputs if beside is not None else {}
        places: dict[str, tuple[str, str]] = {}
        for sink in stream.sinks.values():
            known = {_place(outputs, entry.code, sink.name) for entry in coverage.entries}
            place = known.pop() if len(known) == 1 and not coverage.missing else None
            if place is not None and sink.mode == "append" and len(stream.sources) == 1:
                places[sink.name] = place
        return cls(coverage.read_by(now), others, places)

    def rows(self, table: str, there: pa.Table) -> pa.Table:
        """The rows of a table from records that the present code has read."""
        if not self.others:
            return there
        partition, offset = (there[column] for column in self.places[table])
        named = pc.and_(pc.is_valid(partition), pc.is_valid(offset))
        places = packed(pc.fill_null(partition, 0), pc.fill_null(offset, -1))
        return there.filter(pc.and_(named, pa.array(within(places, self.spans))))


def _place(outputs: Mapping[str, Mapping[str, PlanOutput]], code: str, table: str) -> tuple[str, str] | None:
    """The columns that hold the record's place in rows of that code; None where there are none, or none recorded."""
    output = outputs.get(code, {}).get(table)
    return output.position if output is not None else None


def _read(source: KafkaSource, spark: SparkSession, spans: Sequence[Span], reader: CommittedReader) -> DataFrame:
    """The records of some ranges; a partition has several where a recovery has skipped offsets between them."""
    by_partition: dict[int, list[Span]] = {}
    for span in spans:
        by_partition.setdefault(span.partition, []).append(span)
    parts = []
    for turn in range(max((len(ranges) for ranges in by_partition.values()), default=1)):
        start, end = dict(reader.low), dict(reader.low)
        for partition, ranges in by_partition.items():
            if turn < len(ranges):
                start[partition], end[partition] = ranges[turn].start, ranges[turn].end
        parts.append(source.batch(spark, start, end))
    return reduce(lambda one, other: one.unionByName(other), parts)


def _table(
    settings: Settings, stream: Stream, name: str, frame: DataFrame, verdict: StreamVerdict, written: _Written
) -> Comparison:
    declared = stream.sinks[name]

    def comparison(outcome: ComparisonOutcome, text: str) -> Comparison:
        return Comparison(declared.name, _WHAT, outcome, text)

    sink = open_sink(settings, declared, stream.name)
    folder = settings.tables / declared.name
    if declared.name in verdict.accepted:
        return comparison("not compared", ACCEPTED)
    try:
        primary = declared is stream.primary
        version = still(folder, verdict.version) if primary else version_at(folder, verdict.position)
    except VersionGone as gone:
        return comparison("unproved", str(gone))
    if sink is None or version is None:
        return comparison("unproved", "the table does not exist")
    state = sorted(set(_STATEFUL.findall(analysed(frame)))) + (["Join"] if len(stream.sources) > 1 else [])
    taking_out = RowRules(tuple(r for r in stream.rules_of(declared.name).rules if r.on_fail in ("drop", "quarantine")))
    reason = _hindrance(settings, stream, state, verdict) or _of_other_code(declared.name, state, written)
    if reason := reason or _of_rules(taking_out, state):
        return comparison("not compared", reason)
    expected = _computed(sink, frame, [topic.name for topic in stream.sources.values()], taking_out)
    if expected is None:
        return comparison("not compared", "what the function makes of the records is larger than the driver takes")
    rows_there = written.rows(declared.name, table_rows.rows(folder, version))
    columns = [column for column in rows_there.column_names if column in expected.column_names]
    left = [column for column in rows_there.column_names if column not in columns]
    difference = compare_rows(expected.select(columns), rows_there.select(columns), _TOLERANCE)
    notes = f"; not compared: the columns {', '.join(left)}" if left else ""
    if written.others:
        notes += f"; not compared: {written.others}"
    if state and declared.mode == "append":
        absent = sum(difference.missing.values())
        computed = counted(absent, "computed row", "is", "are")
        notes += f"; {computed} not in it, open yet or too late: not compared" if absent else ""
        difference = type(difference)(difference.columns, {}, difference.extra)
    if difference:
        words = "; ".join(difference.words(declared.keys))
        if state and (reason := too_late(verdict.coverage, stream, "all records at once have them")):
            return comparison("unproved", f"{reason}; {differing(difference)}: {words}{notes}")
        return comparison("wrong", f"{words}{notes}")
    rows = counted(rows_there.num_rows, "row", "is", "are")
    return comparison("ok", f"{rows} what the function makes of the records, at once{notes}")


def _of_rules(rules: RowRules, state: Sequence[str]) -> str:
    """The reason why rows that row rules removed cannot be identified now; empty if they can."""
    if rules.unique:
        return "a rule on the rows of one batch (Unique) takes rows out, and all records at once are no batch"
    if rules and state:
        return "row rules take out rows of a running aggregation, of which only the last ones can be computed now"
    return ""


def _computed(sink: DeltaSink, frame: DataFrame, topics: Sequence[str], rules: RowRules) -> pa.Table | None:
    """The rows that the function makes and `rules` leave; None where they are larger than the driver takes."""
    try:
        dropping = RowRules(tuple(replace(rule, on_fail="drop") for rule in rules.rules))
        rows = fitted(sink.declared, sink.schema, frame, topics, dropping)
        staged = prepare_write(
            sink, rows, driver=True, spark_commits=False, batch=(0, 0), topics=topics, rules=dropping
        )
    except Exception as error:
        if not larger_than_the_driver_takes(error):
            raise
        return None
    assert isinstance(staged, ArrowAppend | ArrowMerge)
    computed = staged.table
    if DELETE_COLUMN not in computed.column_names:
        return computed
    return computed.filter(pc.invert(pc.fill_null(computed[DELETE_COLUMN], False)))


def _hindrance(settings: Settings, stream: Stream, state: Sequence[str], verdict: StreamVerdict) -> str:
    if any(node.startswith("Deduplicate") for node in state):
        return "which of several equal records a deduplication keeps depends on how they came"
    beside = StateEvidence.read(settings.state, stream.name)
    steps = path(beside, verdict.position) if beside is not None and verdict.position is not None else []
    if state and any(life.restarts and life.from_generation is not None for life, _, _ in steps):
        return "a recovery has discarded the state, so older rows and newer ones do not belong to one computation"
    return ""


def _of_other_code(table: str, state: Sequence[str], written: _Written) -> str:
    """The reason why the present code's rows cannot be compared apart from other code's; empty where they can."""
    if not written.others or (not state and table in written.places):
        return ""
    if state:
        return f"{written.others}, and today's rows rest on their state ({', '.join(state)})"
    return f"{written.others}, whose rows cannot be distinguished from those of today's code"
