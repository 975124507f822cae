"""The plan of a stream's function: what Spark cannot do with it, and what it means for the state that there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import structlog

from streaming_jobs.declare.table import Emit, emits
from streaming_jobs.errors import ConfigurationError, PreflightRefused
from streaming_jobs.runtime import state_fit
from streaming_jobs.runtime.code_version import loaded_code
from streaming_jobs.runtime.shared_plan import SharedPlan
from streaming_jobs.runtime.spark_plan import (
    EMIT,
    INPUT,
    PlanTraits,
    analysed,
    has_aggregate,
    parameters_read,
    set_to,
    state_fingerprint,
    state_input,
    traits,
)
from streaming_jobs.runtime.state_changes import StateChange, classified, differences, other_state
from streaming_jobs.settings import Settings
from streaming_jobs.state import checkpoint
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = structlog.get_logger()


def emits_of(stream: Stream) -> dict[str, Emit]:
    """By sink, when an operator with state emits."""
    topics, tables = stream.topic_sinks, {**stream.sinks, **stream.postgres_tables}
    return {name: topics[name].emit if name in topics else emits(tables[name]) for name in stream.output_names}


def emit_of(stream: Stream) -> Emit:
    """When an operator with state emits: at the same time into all sinks, as `FunctionPlan.traits` checks."""
    return next(iter(emits_of(stream).values()))


def format_of_state(of: checkpoint.Checkpoint) -> dict[str, str]:
    """The option by which Spark goes on in the format that the state has; state of another job may have the first one.

    Spark's default state store knows no other.
    """
    return {"spark.sql.streaming.stateStore.checkpointFormatVersion": str(of.state_format)}


@contextmanager
def all_set_to(spark: SparkSession, values: Mapping[str, str]) -> Iterator[None]:
    """`set_to` for several options."""
    with ExitStack() as stack:
        for key, value in values.items():
            stack.enter_context(set_to(spark, key, value))
        yield


@dataclass(frozen=True)
class FunctionPlan:
    """The frames that a stream's function has returned, by sink."""

    stream: Stream
    settings: Settings
    outputs: Mapping[str, DataFrame]

    @cached_property
    def traits(self) -> PlanTraits:
        """What the plan does; raises ConfigurationError for what Spark cannot do right, with another way."""
        outputs = self.outputs
        each = [traits(frame) for frame in outputs.values()]
        stateful = any(t.stateful for t in each)
        emitted = emits_of(self.stream)
        if stateful and len(set(emitted.values())) > 1:
            words = ", ".join(f"{name} at '{emit}'" for name, emit in emitted.items())
            raise ConfigurationError(
                f"stream {self.stream.name} keeps state, which is emitted for all its sinks at the same time, and its "
                f"sinks want {words}",
                "write emit='close' at the sinks with keys, or name the keys of the others",
            )
        anew = len(outputs) > 1 and not stateful and len(self.stream.sources) == 1
        if not anew and any(t.reads > len(self.stream.sources) for t in each):
            raise ConfigurationError(
                f"stream {self.stream.name} uses a topic's frame twice (a union or a join with itself), and Spark "
                "would read the topic twice, at two positions",
                "write it as one pass: a flag column or an explode instead of a union, a window instead of a self-join",
            )
        if null_keys := [key for t in each for key in t.null_keys]:
            raise ConfigurationError(
                f"stream {self.stream.name} has a full outer join of streams on {', '.join(null_keys)}, and Spark "
                "would match rows whose keys are null",
                "rule it out in the join's condition, for each key: [left.key == right.key, left.key.isNotNull()]; "
                "rows with a null key are then kept, unmatched",
            )
        unknown = sorted({operator for t in each for operator in t.unknown})
        if unknown:
            route = (
                "`path` keeps batches on the driver"
                if self.settings.for_stream(self.stream.name).path == "driver"
                else "batches take the executors"
            )
            event = f"unknown operators may keep state or multiply rows: {route}"
            log.warning(event, stream=self.stream.name, operators=",".join(unknown))
        self._flag_what_no_replay_repeats(each)
        return PlanTraits(
            stateful=stateful,
            multiplies=any(t.multiplies for t in each),
            unknown=tuple(unknown),
            joins_streams=any(t.joins_streams for t in each),
            semi_joins=any(t.semi_joins for t in each),
            wall_clock=any(t.wall_clock for t in each),
            watermarks=max(t.watermarks for t in each),
        )

    def _flag_what_no_replay_repeats(self, each: Sequence[PlanTraits]) -> None:
        if unrecorded := sorted({name for traits in each for name in traits.unrecorded}):
            event = "the function reads a table or files itself: a replay reads what they hold then; declare a lookup"
            log.warning(event, stream=self.stream.name, reads=", ".join(unrecorded), see="docs/lookup.md")
        if any(traits.wall_clock for traits in each):
            event = "timers of the wall clock: a replay fires them at other times, and may write other rows"
            log.warning(event, stream=self.stream.name, see="docs/streams.md")

    @property
    def shared(self) -> bool:
        """True if the outputs have to be made of one frame; without state or a join, each batch makes them anew."""
        return self.traits.stateful or len(self.stream.sources) > 1

    def checked_frame(self) -> DataFrame:
        """The frame that the outputs are made of, or the first output where each batch makes them anew.

        Raises ConfigurationError for outputs that would have to be made of one frame, and are not.
        """
        shared = len(self.outputs) > 1 and self.shared
        return SharedPlan.of(self.stream.name, self.outputs).frame if shared else next(iter(self.outputs.values()))

    def checked_state(self, record: StreamRecord, *, keeps_state: bool) -> dict[str, str]:
        """The fingerprint of the state that the function builds; raises PreflightRefused if it has to keep another."""
        before, fingerprint = self._states(record)
        if keeps_state and (changes := differences(before, fingerprint)):
            raise other_state(self.stream.name, changes, self.stream.rebuild_step())
        return fingerprint

    def check_sources(self, record: StreamRecord, of: checkpoint.Checkpoint) -> None:
        """Raise PreflightRefused if the function no longer reads a source that has a position in the checkpoint.

        Spark would refuse each start. A rebuild does not help: its replay has to reach the end of each topic.
        """
        before, now = self._sources_read(record, of)
        if missing := [name for name in before if name not in now]:
            raise PreflightRefused(
                f"stream {self.stream.name} has read {', '.join(missing)}, and its function no longer does",
                "read it still, and leave its records out: .where('false'); or make it a new stream",
            )

    def other_sources(self, record: StreamRecord, of: checkpoint.Checkpoint) -> str:
        """The order of sources that keeps the function from continuing at the positions in a checkpoint, in words.

        Empty if it can. Spark finds the position of a source by its number, and numbers them as the plan reads them.
        """
        before, now = self._sources_read(record, of)
        if before == now or not set(before) <= set(now):
            return ""
        return f"positions of {', '.join(before)}, in this order; the function reads {', '.join(now)}"

    def _sources_read(self, record: StreamRecord, of: checkpoint.Checkpoint) -> tuple[list[str], list[str]]:
        """The topics and tables that have positions in a checkpoint, and those of the function; empty if not known."""
        last = of.last_planned
        if len(self.stream.sources) == 1 or last is None or record.adopted or "-" in of.sources(last):
            return [], []
        now = [self.stream.sources[each].name for each in parameters_read(analysed(next(iter(self.outputs.values()))))]
        return (list(of.end(last)), now) if now else ([], [])

    def _states(self, record: StreamRecord) -> tuple[Mapping[str, str], dict[str, str]]:
        """The fingerprints of the state that the stream has, and of the one that its function builds."""
        fingerprint, before = state_fingerprint(next(iter(self.outputs.values()))), record.state_fingerprint
        if has_aggregate(fingerprint):
            fingerprint[EMIT] = emit_of(self.stream)
            if has_aggregate(before) and not self.stream.batches_only:  # before `emit`, the table's keys decided
                before = {EMIT: "update" if self.stream.primary.mode == "upsert" else "close", **before}
        return before, fingerprint

    def change(self, spark: SparkSession, record: StreamRecord, of: checkpoint.Checkpoint) -> StateChange:
        """What the function means for the state in a checkpoint; raises as `traits`."""
        joins_streams = self.traits.joins_streams
        before, after = self._states(record)
        if of.last_committed is None:
            return StateChange("harmless", "the stream has no state yet")
        if changes := self.other_sources(record, of):
            return StateChange("state has to be rebuilt", changes)
        frame = self.checked_frame()
        options = {"spark.sql.constraintPropagation.enabled": "true"} if joins_streams else {}
        if record.adopted:
            options |= format_of_state(of)
        refused = ""
        if after and not differences(before, after):
            try:
                with all_set_to(spark, {**options, "spark.sql.adaptive.enabled": "false"}):
                    refused = state_fit.refusal(frame, of, updates=emit_of(self.stream) == "update")
            except state_fit.NotPlanned as error:
                return StateChange("known after a preview", f"Spark did not plan it beforehand: {error}")
        return classified(before, self.with_input(after), refused)

    def with_input(self, fingerprint: Mapping[str, str]) -> dict[str, str]:
        """The fingerprint of the state, with a hash of what the state is made of."""
        if not fingerprint:
            return {}
        code = loaded_code(self.stream, self.settings.flows).hash
        return {**fingerprint, INPUT: state_input(next(iter(self.outputs.values())), code)}
