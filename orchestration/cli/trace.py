"""`recourse trace`: what became of a record, through all streams, and from which records a row came."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.options import invocation
from orchestration.cli.sample import for_json, plain
from orchestration.cli.text import Output, OutputOption, show
from streaming_jobs.errors import UsageError
from streaming_jobs.text.spelling import counted, instant_words

if TYPE_CHECKING:
    from reprocessing.trace import Origin, Trace, TracedBatch

_ROWS = 20

_FILES = 3
"""Files of a batch and table that are printed; JSON has all."""


def trace(
    context: typer.Context,
    record: Annotated[
        str | None,
        typer.Argument(metavar="[TOPIC/PARTITION:OFFSET]", help="A record; or a version of a table, as TABLE:VERSION."),
    ] = None,
    table: Annotated[
        str | None, typer.Option(help="With --where: the rows of this table, in place of a record.")
    ] = None,
    where: Annotated[str | None, typer.Option(help='A SQL condition on the table\'s columns: "order_id = 7".')] = None,
    output: OutputOption = Output.text,
) -> None:
    """Print each batch that read a record, and what it made: rows, versions, records of topics, and what read those.

    Reads ledger files and tables only; needs neither Spark nor a broker. With --table and --where it begins at the
    records of which the rows were made. Batches that a recovery has replaced are shown as such.
    """
    from reprocessing.trace import Records, origins, places
    from reprocessing.trace import trace as traced

    call = invocation(context)
    if (record is None) == (table is None) or (table is None) != (where is None):
        raise UsageError(
            "trace takes a record, or --table and --where", "a record is TOPIC/PARTITION:OFFSET, such as orders/0:1234"
        )
    if record is not None:
        starts = [Records.parse(record)]
    else:
        assert table is not None and where is not None
        starts = places(call.settings, call.topology, table, where, _ROWS)
        if not starts:
            raise UsageError(f"no row of {table} meets the condition '{where}'", "ask for another row")
    found = [
        (origins(call.settings, call.topology, start), traced(call.settings, call.topology, start)) for start in starts
    ]
    value = [
        {"origins": [asdict(each) for each in made_by], **asdict(each), "start": str(each.start)}
        for made_by, each in found
    ]
    show(output, for_json(value), lambda: _print(found))


def _print(found: Iterable[tuple[list[Origin], Trace]]) -> None:
    for made_by, traced in found:
        print(str(traced.start))
        for origin in made_by:
            read = ", ".join(map(str, origin.read))
            print(f"  written by stream {origin.stream}, {origin.txn}, code {origin.code}, of {read}, and of its state")
        for batch in traced.batches:
            _print_batch(batch)
        if not traced.batches:
            print("  no batch that is still known has read it")
        if not traced.complete:
            print(f"  ... and more: these are the first {len(traced.batches):,} batches")


def _print_batch(batch: TracedBatch) -> None:
    now = "" if batch.present else "; replaced by a recovery"
    print(f"  {batch.read} -> stream {batch.stream}, {batch.txn} at {instant_words(batch.at)}, code {batch.code}{now}")
    rows = batch.of_record or {}
    for table, version in {**batch.published, **batch.versions}.items():
        count = batch.rows_of(table) or 0
        if count or table == batch.primary:
            of_record = f", {counted(len(rows.get(table, ())), 'row')} of the record" if table in batch.placed else ""
            by = ", of a recovery" if table in batch.published else ""
            print(f"    table {table}, version {version}{by}: {counted(count, 'row')} of the batch{of_record}")
            for file in batch.files.get(table, ())[:_FILES]:
                print(f"      file {file}")
            if (further := len(batch.files.get(table, ())) - _FILES) > 0:
                print(f"      and {counted(further, 'file')} more")
    for table, version in batch.rebuilt.items():
        print(f"    table {table}: rebuilt, and read by streams of the same recovery at version {version}")
    for table, made in rows.items():
        for row in made:
            print(f"      {table}: {_row(row)}")
    for redrive, outcome in batch.redriven:
        print(f"    redrive {redrive}: {outcome}")
    for written in batch.written:
        print(f"    topic records {written}")
    for what, count in batch.taken_out.items():
        print(f"    {count:,} {what} in the batch")


def _row(row: Mapping[str, Any]) -> str:
    text = ", ".join(f"{name}={value}" for name, value in for_json(row).items() if value is not None)
    return plain(text if len(text) <= 300 else f"{text[:297]}...")
