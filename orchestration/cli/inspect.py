"""`recourse inspect`: what a job of Spark has done, Recourse's own or any other, from its files alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestration.cli.options import invocation
from orchestration.cli.text import Output, OutputOption, say, show

if TYPE_CHECKING:
    from orchestration.cli.options import Invocation
    from streaming_jobs.inspection.counted_offsets import OffsetColumns
    from streaming_jobs.inspection.inspection import Inspection
    from streaming_jobs.storage.locations import Location

FOUND = 10
"""The exit code for records that are missing or doubled, or would be."""


def inspect(
    context: typer.Context,
    checkpoints: Annotated[
        list[str], typer.Argument(metavar="CHECKPOINT...", help="Checkpoint folders of the job.", show_default=False)
    ],
    tables: Annotated[
        list[str],
        typer.Option("--table", metavar="PATH", help="A Delta table that it writes; may be given again."),
    ],
    offset_columns: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Count the rows: columns partition,offset or partition,offset,topic."),
    ] = None,
    broker: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Compare with the topics as this broker has them.")
    ] = None,
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page.", show_default=False)] = None,
    output: OutputOption = Output.text,
) -> None:
    """Rebuild what a streaming job from Kafka to Delta has done: what is missing, doubled, or about to be.

    Reads checkpoints and Delta logs, and writes nothing to them. Name also the checkpoints that the job had before.
    Exit codes: 0 nothing found, 10 records are missing or doubled or would be, 2 usage.
    """
    from streaming_jobs.inspection.inspection import inspect as run

    call = invocation(context)
    columns = None if offset_columns is None else _columns(offset_columns)
    folders, places = ([location(call, path) for path in paths] for paths in (checkpoints, tables))
    found = run(folders, places, columns)
    if broker is not None:
        found = _beside_topics(call, found, broker)
    show(output, found.as_json(), lambda: _print(found))
    if page is not None:
        from streaming_jobs.inspection.page import page as as_page
        from streaming_jobs.storage.files import write_atomic

        write_atomic(page.absolute(), as_page(found))
        say(f"the page is in {page}")
    if found.alarming:
        raise typer.Exit(FOUND)


def _columns(text: str) -> OffsetColumns:
    from streaming_jobs.inspection.counted_offsets import OffsetColumns  # imports Arrow and deltalake

    return OffsetColumns.parse(text)


def location(call: Invocation, text: str) -> Location:
    """The location that a path or an address on a command line names."""
    from streaming_jobs.settings_sections import is_remote
    from streaming_jobs.storage.locations import at

    return at(text, call.settings.storage.options(text)) if is_remote(text) else Path(text).expanduser().absolute()


def _beside_topics(call: Invocation, found: Inspection, broker: str) -> Inspection:
    from streaming_jobs.inspection.inspection import beside_topics
    from streaming_jobs.sources.topics import Topics

    topics = Topics.of(call.settings.kafka, broker)
    there = topics.names()
    names = {topic for each in found.checkpoints for batch in each.in_order[-1:] for topic in batch.end}
    return beside_topics(found, {name: topics.offsets(name) if name in there else None for name in names})


def _print(found: Inspection) -> None:
    from streaming_jobs.inspection.page import table_words
    from streaming_jobs.verification.offset_ranges import shown

    for table in found.tables:
        print(f"table {table.history.name}: {table_words(table)}".replace("; ", "\n  "))
    for each in found.findings:
        print(f"\n{each.kind.replace('_', ' ')} ({each.certainty}): {each.words}")
        if each.spans:
            print(f"  {'some of ' if each.within else ''}offsets {shown(each.spans)}")
        if each.next_step:
            print(f"  next: {each.next_step}")
    unread = [each for each in found.topics if each.unread]
    if found.topics:
        print(f"\nunread: {sum(each.unread or 0 for each in unread):,} records in {len(unread)} partitions")
    print(f"\n{found.verdict}")
