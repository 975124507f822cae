"""`recourse state`: what a stream's operators remember, read from a committed batch; nothing is written."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.options import AnyStreams, StreamName, invocation
from orchestration.cli.text import Output, OutputOption, number, say, show, show_table
from streaming_jobs.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from streaming_jobs.settings import Settings
    from streaming_jobs.state.checkpoint import Checkpoint

app = typer.Typer(no_args_is_help=True, help="What a stream's operators remember.", rich_markup_mode=None)

BatchOption = Annotated[
    int | None, typer.Option(metavar="N", help="The state after this batch; by default after the newest one.")
]


@app.callback()
def state() -> None:
    """The state of a stream's operators. The stream may run; its checkpoint is only read, which needs Spark."""


@app.command("list", short_help="Print the operators with state: columns, rows, bytes, skew, growth.")
def list_(
    context: typer.Context, streams: AnyStreams = None, batch: BatchOption = None, output: OutputOption = Output.text
) -> None:
    """Print each store of each operator: columns, rows, partitions, skew, growth; and the bytes of the operator.

    Skew is the rows of the fullest partition, divided by those of an average one. Growth is the change of the rows
    since the middle one of the batches that can be read. Without STREAM: all streams that have state.
    """
    from streaming_jobs.inspection.operator_state import figures

    call = invocation(context)
    checkpoints = {name: _checkpoint(call.settings, name) for name in call.names(streams or [])}
    found: list[dict[str, Any]] = []
    with _spark(call.settings) as spark:
        for name, checkpoint in checkpoints.items():
            if checkpoint is not None and checkpoint.has_state:
                at, each = figures(spark(), checkpoint, batch)
                found += [{"stream": name, "batch": at, **figure.as_json()} for figure in each]
    rows = [
        [
            row["stream"],
            f"{row['operator']} {row['kind']}",
            row["name"],
            *(number(row[key]) for key in ("rows", "bytes", "partitions", "skew")),
            f"{row['rows'] - row['rows_before']:+,} since batch {row['before']}",
            ", ".join(f"{column} {kind}" for column, kind in row["columns"].items()),
        ]
        for row in found
    ]
    headings = ("stream", "operator", "store", "rows", "bytes", "partitions", "skew", "growth", "columns")
    show_table(output, found, headings, rows, right=("rows", "bytes", "partitions", "skew"))
    if not found:
        say("no state: these streams have not run, or keep none")


@app.command("show", short_help="Print what the state holds of one key.")
def show_(
    context: typer.Context,
    stream: StreamName,
    key: Annotated[
        str,
        typer.Option(metavar="KEY", help='A value of any column of the key, or some columns: \'{"origin": "EWR"}\'.'),
    ],
    batch: BatchOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Print the entries of a key in each store of each operator, the timers of a processor included."""
    from streaming_jobs.inspection.operator_state import entries_of

    call = invocation(context)
    call.names([stream])
    checkpoint = _checkpoint(call.settings, stream)
    if checkpoint is None or not checkpoint.has_state:
        raise UsageError(f"stream {stream} has no state", "it has not run, or its function keeps none")
    with _spark(call.settings) as spark:
        found = entries_of(spark(), checkpoint, _wanted(key), batch)

    def text() -> None:
        for entry in found:
            place = f"operator {entry['operator']}, {entry['store']}, partition {entry['partition']}"
            print(f"{place}: {json.dumps(entry['key'], default=str, ensure_ascii=False)}")
            for name, value in entry.items():
                if name not in ("operator", "store", "partition", "key"):
                    print(f"  {name}: {json.dumps(value, default=str, ensure_ascii=False)}")
        if not found:
            say(f"the state has nothing of {key}")

    show(output, found, text)


def _checkpoint(settings: Settings, stream: str) -> Checkpoint | None:
    """The checkpoint of the stream's generation; None if it has never run."""
    from streaming_jobs.state import stream_record
    from streaming_jobs.state.stream_folder import StreamFolder

    record = stream_record.load(settings, stream)
    return None if record is None else StreamFolder.of(settings, stream).checkpoint(record.generation)


def _spark(settings: Settings) -> AbstractContextManager[Callable[[], SparkSession]]:
    """Spark in a JVM on this machine, whatever runs the streams; killed at the end: it writes nothing."""
    from streaming_jobs.platform.runtime import spark_on_demand
    from streaming_jobs.platform.spark import ONE_COMPILER
    from streaming_jobs.platform.spark_jvm import JAVA_OPTIONS

    extra = {
        # To count rows as it loads a store, Spark would look up each key that a changelog has: half of the time.
        "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
        **settings.spark.extra,
        # Java's second compiler would take longer than the reading does.
        JAVA_OPTIONS: f"{ONE_COMPILER} {settings.spark.extra.get(JAVA_OPTIONS, '')}".strip(),
    }
    local = settings.spark.model_copy(update={"master": "local[*]", "extra": extra})
    logging.getLogger().addFilter(_not_of_py4j)
    return spark_on_demand(settings.model_copy(update={"spark": local}), "state", kill=True)


def _not_of_py4j(record: logging.LogRecord) -> bool:
    """False for Py4J's reports that the JVM is gone.

    A thread of Py4J's makes them, as objects are freed after the kill, with the functions of `logging`: by the root
    logger. So the filter stays there to the end of the process.
    """
    return record.module != "java_gateway"


def _wanted(key: str) -> str | dict[str, Any]:
    """The key as text, or the columns that a JSON object names."""
    try:
        columns = json.loads(key)
    except ValueError:
        return key
    return columns if isinstance(columns, dict) else key
