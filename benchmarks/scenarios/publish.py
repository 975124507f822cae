"""How long a recovery's publish and its savepoint take by the number of the table's files. No Spark, no Kafka.

    python -m benchmarks publish --files 1000,10000
    python -m benchmarks publish --compared 1000000,4000000

Half of the files stay, half are replaced. `commit` is the time for which the publish is one commit away from readers:
from the look at the table to the new version. With `--compared`, the audit's comparison of two tables of so many rows
that share no file: its seconds, and the memory (MB) by which the process has grown.
"""

from __future__ import annotations

import resource
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from deltalake.transaction import AddAction, RemoveAction

from benchmarks.laid_home import ROWS, data_file, unchanged
from benchmarks.run import Report, Row, seconds_of
from reprocessing.replay.difference import compare
from reprocessing.stages.publish import PublishPosition, publish
from streaming_jobs.formats import Json
from streaming_jobs.ledger.entry import CodeVersion, Txn, app_id
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.content import content_of
from streaming_jobs.sinks.delta.log import STREAM_PROPERTY
from streaming_jobs.sinks.delta.table_files import table_files
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_record import Accepted
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.stream import KafkaTopic, Stream

STREAM = Stream("things", unchanged, {"value": KafkaTopic("t", Json(ROWS))}, {"t": Declared("things")})
_STEP = 500_000


def run(
    report: Report,
    *,
    files: Annotated[tuple[int, ...], "sizes of the table, in files"] = (1_000, 10_000),
    compared: Annotated[tuple[int, ...], "sizes of the tables to compare, in rows, the smallest first"] = (),
) -> None:
    measure = _compared if compared else _published
    rows = []
    for count in compared or files:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as home:
            rows.append(measure(Path(home), count))
    report.table("compared" if compared else "published", rows)


def _compared(home: Path, count: int) -> Row:
    """A comparison of two tables whose files are all different, and a hundredth of whose rows is."""
    for side in (0, 1):
        for begin in range(0, count, _STEP):
            ids = range(begin, min(begin + _STEP, count))
            values = [n + (side if n % 100 == 0 else 0) for n in ids]
            rows = pa.table({"id": ids, "text": [f"a text of row {n} that is not short" for n in ids], "n": values})
            write_deltalake(home / f"{side}", rows, mode="append")
    before = _peak_mb()
    tables = DeltaTable(home / "0"), DeltaTable(home / "1")
    seconds = seconds_of(lambda: compare("t", *tables, ["id"], home / "compared"))
    return {"rows": count, "seconds": seconds, "MB": _peak_mb() - before}


def _peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def _published(home: Path, count: int) -> Row:
    settings = Settings.load({"home": home})
    live, staged = settings.tables_folder / "things", settings.tables_folder / "_staging" / "p" / "things"
    _lay_table(live, range(count))
    _lay_table(staged, range(count // 2, count + count // 2), shared=live)
    commits = []

    def publish_all() -> None:
        done = publish(
            settings,
            STREAM,
            {"things": content_of(staged)},
            record=replace(stream_record.first("things"), accepted=(Accepted("things", 1, "made here", 0.0),)),
            plan="things-0001",
            position=PublishPosition(Txn(2, 5), (), CodeVersion("x", "1")),
        )
        commits.append(done[-1].seconds)

    listed = seconds_of(lambda: table_files(live, DeltaTable(live).version()))
    published = seconds_of(publish_all)
    return {"files": count, "publish, all s": published, "its commit s": commits[0], "list of files s": listed}


def _lay_table(path: Path, numbers: range, shared: Path | None = None) -> None:
    """A table of small files; those that `shared` has too are the same files."""
    path.mkdir(parents=True)
    columns = Schema.from_arrow(pa.schema([("id", pa.int64()), ("place", pa.string())]))
    table = DeltaTable.create(path, columns, configuration={STREAM_PROPERTY: "things"}, raise_if_key_not_exists=False)
    files: list[AddAction | RemoveAction] = [data_file(path, number, shared=shared) for number in numbers]
    transaction = Transaction(app_id("things", "things"), Txn(1, 5).version, 1)
    properties = CommitProperties(app_transactions=[transaction])
    table.create_write_transaction(files, mode="append", schema=table.schema(), commit_properties=properties)
