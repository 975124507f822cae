"""A trial of the code on disk, in a Spark session of its own: what would refuse a start, before the stream stops.

    python -m streaming_jobs.runtime.trial orders,totals

The stream's function is called and its plan analysed, as at a start: a changed aggregation on existing state, an output
that does not fit its table, and an exception of the function show here. No query is started, no broker asked, and
nothing is written but Spark's log and scratch files. Prints one JSON object: stream -> `TrialVerdict`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from streaming_jobs.catalog.topology import Topology
from streaming_jobs.platform.failures import classify
from streaming_jobs.platform.processes.child import ChildCommand
from streaming_jobs.platform.runtime import LocalSpark
from streaming_jobs.runtime.session_options import log_to_stderr
from streaming_jobs.runtime.state_changes import OTHER_STATE, ChangeKind, other_state
from streaming_jobs.settings import Settings, load
from streaming_jobs.sources.connection import Connection
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.storage.files import scratch
from streaming_jobs.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TAKES = 180.0
"""Time limit, in seconds, of a trial in a process of its own; most of it is the start of Spark."""


@dataclass(frozen=True)
class TrialVerdict:
    """What a start with the new code would meet: `found` refuses it, with the next step; empty if nothing does.

    `change` is its class (`state_changes.StateChange`), for the reason `why`; `columns` are tables' changes in words.
    """

    found: str = ""
    next_step: str = ""
    change: ChangeKind = "known after a preview"
    why: str = ""
    columns: tuple[str, ...] = ()

    @property
    def only_state(self) -> bool:
        """True if the state is the only reason to refuse the code: a rebuild of the state can run it."""
        return self.change == "state has to be rebuilt" and self.found.startswith(OTHER_STATE)


def trial(settings: Settings, stream: Stream, spark: SparkSession) -> TrialVerdict:
    """The verdict about the code that this process has loaded. Of several faults the state is the last."""
    from streaming_jobs.runtime.query_builder import QueryBuilder

    record = stream_record.load(settings, stream.name)
    if record is None:
        record = stream_record.first(stream.name)
    checkpoint = StreamFolder.of(settings, stream.name).checkpoint(record.generation)
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
        change, columns = builder.change(spark, record, checkpoint)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything; it is shown
        classified = classify(error)
        return TrialVerdict(classified.found, classified.next_step)
    verdict = TrialVerdict("", "", change.kind, change.why, tuple(columns))
    rebuilt = change.kind == "state has to be rebuilt"
    try:
        builder.check(spark, record, keeps_state=checkpoint.last_committed is not None and not rebuilt)
        if rebuilt:
            raise other_state(stream.name, change.why, stream.rebuild_step())
    except Exception as error:  # noqa: BLE001 - as above
        classified = classify(error)
        step, rebuild = classified.next_step, stream.rebuild_step()
        if rebuilt and rebuild not in step:
            step = f"{step}; the state has to be rebuilt as well: {rebuild}"
        return replace(verdict, found=classified.found, next_step=step)
    return verdict


def tried(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, TrialVerdict] | None:
    """The verdicts of a trial in a process of its own, by stream; None without all of them within `TAKES` seconds."""
    arguments = [sys.executable, "-m", __name__, ",".join(names)]
    child = ChildCommand(arguments, {**os.environ, **environment}).start_reaped(subprocess.PIPE)
    try:
        output, _ = child.process.communicate(timeout=TAKES)
    except subprocess.TimeoutExpired:
        return None
    finally:
        child.kill()
    for line in reversed(output.decode(errors="replace").splitlines()):
        with suppress(ValueError, TypeError):
            value = json.loads(line)
            if isinstance(value, dict) and set(value) == set(names):
                return {
                    name: TrialVerdict(**{**each, "columns": tuple(each["columns"])}) for name, each in value.items()
                }
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
    print(f"\n{json.dumps({name: asdict(each) for name, each in verdicts.items()})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
