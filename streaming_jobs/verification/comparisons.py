"""The comparisons of a declared table with its declaration, its entries and the records, table by table.

| comparison | of | says |
|---|---|---|
| row counts   | append tables                    | there are as many rows as the entries say were written |
| records      | plans of one row per record      | every record is one row or a dead letter, by its place, or counted |
| keys         | upserts                          | no key twice, none that is null |
| equation     | plans of one row per record      | of each batch: `records.py` |
| dead letters | every stream                     | each refused record once, with its format's own reason |

Values are not compared here: that takes a truth of the user's own (`truths.py`), or Spark (`recompute.py`).
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from deltalake.exceptions import DeltaError

from streaming_jobs.platform import table_rows
from streaming_jobs.storage.locations import delta_table
from streaming_jobs.text.spelling import counted
from streaming_jobs.verification.dead_letters import compare_letters
from streaming_jobs.verification.delta_log import read_commit, versions
from streaming_jobs.verification.examination import Examination, VersionGone
from streaming_jobs.verification.offset_ranges import Span, unpacked, within
from streaming_jobs.verification.records import LETTERS, Made, compare_batches, compare_records, held
from streaming_jobs.verification.state_evidence import ACCEPTED, uncounted
from streaming_jobs.verification.subject import Comparison, StreamTable

_UNREADABLE = (DeltaError, OSError, ValueError, pa.ArrowException)


def compare_tables(exam: Examination) -> tuple[list[Comparison], list[Span], list[Span], int]:
    """Every comparison of every table, the offsets lost and doubled, and the number of rows of the primary table."""
    sizes = {}
    for table in exam.subject.tables:
        try:
            version = exam.version_of(table.name)
        except VersionGone as gone:
            exam.tell(table.name, "rows", "unproved", str(gone))
            continue
        try:
            sizes[table.name] = _table(exam, table, version)
        except _UNREADABLE as error:
            if version is not None and max(versions(exam.tables / table.name), default=-1) > version:
                text = "they were rewritten and cleaned up while they were to be read: verify again"
                exam.tell(table.name, "rows", "unproved", text)
            else:
                exam.tell(table.name, "rows", "wrong", f"they cannot be read: {str(error)[:300]}")
    return exam.found, exam.lost, exam.doubled, sizes.get(exam.subject.table, 0)


def _table(exam: Examination, table: StreamTable, version: int | None) -> int:
    if version is None:
        counts = (exam.coverage.written or {}).get(table.counted, 0)
        if table.name != exam.subject.dead_letters and table.counted and (counts or not table.is_beside):
            exam.tell(table.name, "rows", "wrong", "there is no such table")
        return 0
    handle = delta_table(exam.tables / table.name, version)
    letters = table.name == exam.subject.dead_letters
    output = None if letters or not table.counted or table.is_beside else _made(exam, table.name)
    columns = list(dict.fromkeys([*table.keys, *(LETTERS if letters else (output.position or ()) if output else ())]))
    rows = table_rows.rows(exam.tables / table.name, version, columns or [handle.schema().fields[0].name])
    _foreign(exam, table)
    if not table.keys:
        _counts(exam, table, rows.num_rows, version)
    if table.keys:
        _keys(exam, table, rows)
    if output is not None:
        compare_records(exam, table, output, rows, [field.name for field in handle.schema().fields])
        compare_batches(exam, table, dict(output.outputs))
    if letters:
        _letters(exam, table, rows)
    return int(rows.num_rows)


def _made(exam: Examination, table: str) -> Made:
    recorded = exam.beside.outputs if exam.beside is not None else {}
    return Made.of(recorded, exam.coverage.entries, table)


def _foreign(exam: Examination, table: StreamTable) -> None:
    """Report foreign commits on the tables that the chain of batches does not cover."""
    if table.name == exam.subject.table:
        return
    accepted = exam.beside.accepted.get(table.name, frozenset()) if exam.beside is not None else frozenset()
    path = exam.tables / table.name
    for version in versions(path):
        try:
            commit = read_commit(path, version)
        except FileNotFoundError:  # cleaned up since the folder was listed
            continue
        if commit.entry is None and commit.changes_rows and version not in accepted:
            text = f"version {version} changed rows ({commit.operation}) and carries no ledger entry"
            exam.tell(table.name, "rows", "wrong", text)


def _counts(exam: Examination, table: StreamTable, rows: int, version: int) -> None:
    written = exam.coverage.written
    slices = [one for one in exam.slices(table.name) if one.is_in(version)]
    redriven = [one for one in exam.redriven(table.name) if one.is_in(version)]
    if exam.accepted(table.name):
        exam.tell(table.name, "row counts", "not compared", ACCEPTED)
    elif reason := uncounted(slices, redriven, exam.position[0] if exam.position else None):
        exam.tell(table.name, "row counts", "not compared", reason)
    elif written is None:
        missing = exam.coverage.missing
        exam.tell(table.name, "row counts", "unproved", f"entries that are gone, by batches: {missing:,}")
    elif (due := written.get(table.counted, 0) + sum(one.after - one.before for one in (*slices, *redriven))) != rows:
        text = f"{counted(rows, 'row', 'is', 'are')} there, the entries say that {due:,} were written"
        exam.tell(table.name, "row counts", "wrong", text)
    else:
        also = f", with {counted(len(slices), 'rebuilt slice')}" if slices else ""
        also += f", with {counted(len(redriven), 'redrive')}" if redriven else ""
        text = f"{counted(rows, 'row')}, as many as the entries say were written{also}"
        exam.tell(table.name, "row counts", "ok", text)


def _keys(exam: Examination, table: StreamTable, rows: pa.Table) -> None:
    keys = list(table.keys)
    nulls = {key: count for key in keys if (count := rows[key].null_count)}
    faults = [f"{counted(count, 'row', 'has', 'have')} a null in key column {key}" for key, count in nulls.items()]
    groups = rows.select(keys).group_by(keys).aggregate([([], "count_all")])
    twice = groups.filter(pc.field("count_all") > 1)
    if twice.num_rows:
        first = ", ".join(str(value) for value in twice.select(keys).slice(0, 1).to_pylist()[0].values())
        faults.append(f"{counted(twice.num_rows, 'key', 'is', 'are')} in more than one row, first {first}")
    if faults:
        exam.tell(table.name, "keys", "wrong", "; ".join(faults))
    else:
        exam.tell(table.name, "keys", "ok", f"{rows.num_rows:,} keys, none twice and none null")


def _letters(exam: Examination, table: StreamTable, rows: pa.Table) -> None:
    if exam.refusals is None:
        exam.tell(table.name, "dead letters", "not compared", "the records were not decoded")
        return
    if exam.accepted(table.name):
        exam.tell(table.name, "dead letters", "not compared", ACCEPTED)
        return
    if exam.refusals.drops:
        exam.tell(table.name, "dead letters", "not compared", "the stream drops the records that its format refuses")
        return
    code = exam.refusals.code
    read = exam.coverage.read_by(code) if code else exam.coverage.spans
    covered = {}
    for topic in exam.subject.topics:
        if topic in exam.topics:
            records = held(exam.topics[topic])
            covered[topic] = records[within(records, [s for s in read if s.topic == topic])]
    others = exam.coverage.others(code) if code else ""
    comparisons, places = compare_letters(table.name, rows, covered, exam.refusals, others)
    exam.found += comparisons
    for topic, (missing, twice) in places.items():
        exam.lost += unpacked(topic, missing.tolist())
        exam.doubled += unpacked(topic, twice.tolist())
