"""A trial of the code on disk, in a Spark session of its own: what would refuse a start, before the stream stops.

    python -m streaming_jobs.runtime.trial orders,totals

The stream's function is called and its plan analysed, as at a start: a changed aggregation on existing state, an output
that does not fit its table, and an exception of the function show here. No query is started, no broker asked, and
nothing is written but Spark's log and scratch files. Prints one JSON object: stream -> `null`, or `found` and `next`.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from streaming_jobs.catalog.topology import Topology
from streaming_jobs.platform.failures import classify
from streaming_jobs.platform.runtime import LocalSpark
from streaming_jobs.runtime.session_options import log_to_stderr
from streaming_jobs.settings import Settings, load
from streaming_jobs.sources.connection import Connection
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.storage.files import scratch
from streaming_jobs.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def trial(settings: Settings, stream: Stream, spark: SparkSession) -> dict[str, str] | None:
    """What would refuse the stream's start with the code that this process has loaded; None if nothing would."""
    from streaming_jobs.runtime.query_builder import QueryBuilder

    record = stream_record.load(settings, stream.name)
    if record is None:
        record = stream_record.first(stream.name)
    kept = StreamFolder.of(settings, stream.name).checkpoint(record.generation).last_committed is not None
    nowhere = scratch(settings.home, "trial").folder / "client.json"
    builder = QueryBuilder(
        stream=stream,
        settings=settings,
        connection=Connection(nowhere, cast("Any", None), cast("Any", None)),
        trigger=settings.for_stream(stream.name).trigger,
        stop=threading.Event(),
        before_commit=lambda _: None,
        report=lambda _: None,
    )
    try:
        builder.check(spark, record, keeps_state=kept)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything; it is shown
        classified = classify(error)
        return {"found": classified.found, "next": classified.next_step}
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point: one argument, the names of the streams with commas between them."""
    log_to_stderr()
    names = (sys.argv[1:] if arguments is None else list(arguments))[0].split(",")
    settings = load().settings
    streams = Topology.of_settings(settings).select(names)
    runtime = LocalSpark(settings)
    try:
        spark = runtime.start("trial")
        verdicts = {stream.name: trial(settings, stream, spark) for stream in streams}
    finally:
        runtime.stop()
    print(f"\n{json.dumps(verdicts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
