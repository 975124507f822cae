"""How long a recovery's publish and its savepoint take by the number of the table's files. No Spark, no Kafka.

    python -m benchmarks.publish --files 1000,10000
    python -m benchmarks.publish --compared 1000000,4000000

Half of the files stay, half are replaced. `commit` is the time for which the publish is one commit away from readers:
from the look at the table to the new version. With `--compared`, the audit's comparison of two tables of so many rows
that share no file: its seconds, and the memory (MB) by which the process has grown.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from deltalake.transaction import AddAction, RemoveAction

from reprocessing.rebuild.audit import compare
from reprocessing.rebuild.publish import publish
from streaming_jobs.ledger.entry import CodeVersion, Txn, app_id
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.content import content_of
from streaming_jobs.sinks.delta.sink import STREAM_PROPERTY
from streaming_jobs.sinks.delta.table_files import table_files
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_record import Accepted
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.stream import KafkaTopic, Stream

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64()), "name": ["a", "b", "c"]})


def main() -> None:
    """Print a line a size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", default="1000,10000", help="sizes of the table, in files")
    parser.add_argument("--compared", help="sizes of the tables to compare, in rows, the smallest first")
    if sizes := parser.parse_args().compared:
        print("| rows | seconds | MB |\n| ---: | ---: | ---: |")
        for count in (int(text) for text in sizes.split(",")):
            with tempfile.TemporaryDirectory() as home:
                seconds, megabytes = compared(Path(home), count)
            print(f"| {count:,} | {seconds:.1f} | {megabytes:,} |")
        return
    print("| files | publish, all s | its commit s | list of files s |\n| ---: | ---: | ---: | ---: |")
    for count in (int(text) for text in parser.parse_args().files.split(",")):
        with tempfile.TemporaryDirectory() as home:
            total, commit, listed = measured(Settings.load({"home": home}), count)
        print(f"| {count:,} | {total:.2f} | {commit:.2f} | {listed:.2f} |")


def compared(home: Path, count: int) -> tuple[float, int]:
    """Seconds of a comparison of two tables whose files are all different, and a hundredth of whose rows is."""
    step = 500_000
    for side in (0, 1):
        for begin in range(0, count, step):
            ids = range(begin, min(begin + step, count))
            values = [n + (side if n % 100 == 0 else 0) for n in ids]
            rows = pa.table({"id": ids, "text": [f"a text of row {n} that is not short" for n in ids], "n": values})
            write_deltalake(home / f"{side}", rows, mode="append")
    before, began = _peak(), time.monotonic()
    compare("t", DeltaTable(home / "0"), DeltaTable(home / "1"), ["id"], home / "compared")
    return time.monotonic() - began, _peak() - before


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def measured(settings: Settings, count: int) -> tuple[float, float, float]:
    """Seconds of a whole publish, of its commit, and of reading the table's list of files."""
    from pyspark.sql.types import LongType, StructField, StructType

    from streaming_jobs.formats import Json

    topic = KafkaTopic("t", Json(StructType([StructField("id", LongType())])))
    stream = Stream("things", lambda value: value, {"value": topic}, {"t": Declared("things")})
    live, staged = settings.tables / "things", settings.tables / "_staging" / "p" / "things"
    _table(live, count, range(count))
    _table(staged, count, range(count // 2, count + count // 2), shared=live)
    began = time.monotonic()
    table_files(live, DeltaTable(live).version())
    listed = time.monotonic() - began
    began = time.monotonic()
    done = publish(
        settings,
        stream,
        {"things": content_of(staged)},
        record=replace(stream_record.first("things"), accepted=(Accepted("things", 1, "made here", 0.0),)),
        plan="things-0001",
        at=Txn(2, 5),
        offsets=(),
        code=CodeVersion("x", "1"),
    )
    return time.monotonic() - began, done[-1].seconds, listed


def _table(path: Path, count: int, numbers: range, shared: Path | None = None) -> None:
    """A table of small files; those that `shared` has too are the same files."""
    path.mkdir(parents=True)
    handle = DeltaTable.create(
        path, Schema.from_arrow(ROWS.schema), configuration={STREAM_PROPERTY: "things"}, raise_if_key_not_exists=False
    )
    actions: list[AddAction | RemoveAction] = []
    for number in numbers:
        file = path / f"part-{number:06d}.parquet"
        if shared is not None and (shared / file.name).exists():
            os.link(shared / file.name, file)
        else:
            pq.write_table(ROWS, file)
        actions.append(AddAction(file.name, file.stat().st_size, {}, 1, True, '{"numRecords":3}'))
    assert len(actions) == count
    transaction = Transaction(app_id("things", "things"), Txn(1, 5).version, 1)
    handle.create_write_transaction(
        actions,
        mode="append",
        schema=handle.schema(),
        commit_properties=CommitProperties(app_transactions=[transaction]),
    )


if __name__ == "__main__":
    main()
