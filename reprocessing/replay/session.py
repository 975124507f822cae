"""One replay: an ordinary session of a stream on folders of its own, from the checkpoint there to an end.

Recoveries and previews run the same `ReplaySession`. Each chooses where it starts (`staging.fill`) and ends (`Border`),
and which topics it writes; a slice, which has no state, reads one batch instead.

A replay reads records that arrived after the published tables' last batch. They are no difference that the new code
makes. So one of the replay's batches ends at the border, where that last batch ended, so that tables can be compared
there; for state under a watermark, one batch also begins where it began, since the rows of a window depend on it.

Spark has written `offsets/N` when it calls for batch N. If that batch would read past the border, its entry is written
anew with an end on the border, and the query is restarted: Spark then runs batch N by the new entry.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprocessing.plan.lookups import first_run
from streaming_jobs.errors import OutputMismatch, PermanentError, PreflightRefused, RecourseError, TransientError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import Place, TopicOffsets, by_place, by_topic, ends_of
from streaming_jobs.platform import spark
from streaming_jobs.platform.runtime import LocalSpark, Runtime
from streaming_jobs.platform.spark import Launched
from streaming_jobs.runtime import output_plans
from streaming_jobs.runtime.batch_hooks import Replan
from streaming_jobs.runtime.spark_plan import not_row_by_row
from streaming_jobs.runtime.stream_queries import SparkQueries
from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.session import Session
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import entries
from streaming_jobs.sinks.tables import store_of
from streaming_jobs.state import stream_record
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import Generation
from streaming_jobs.storage.files import sync, write_atomic
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.archives import Archives

if TYPE_CHECKING:
    from streaming_jobs.runtime.stream_sinks import ExternalSinks

_LOOK_EVERY = 1.0

Watch = Callable[[StreamRunner, int | None], None]
"""Called once per second with the running stream and its newest committed batch (None before the first).

A RecourseError that it raises ends the session, and `ReplaySession.run` raises it again.
"""


@dataclass(frozen=True)
class ReplayFailure:
    """Why a replay did not reach its end. `starts` is False if the code cannot start on the stream's state at all."""

    code: str
    found: str
    next_step: str
    permanent: bool = True
    starts: bool = True

    def error(self, next_step: str) -> RecourseError:
        kind = PermanentError if self.permanent else TransientError
        return kind(f"the replay failed: {self.code} {self.found}", next_step)


@dataclass(frozen=True)
class ReplayResult:
    """The ledger entry of the replay's last batch, or why the replay failed."""

    last: LedgerEntry | None
    failure: ReplayFailure | None = None

    @property
    def reached(self) -> TopicOffsets:
        return ends_of(self.last.offsets) if self.last is not None else {}


@dataclass(frozen=True)
class ReplaySession:
    """A replay of `stream` under `settings`, whose state and tables must exist and belong to the replay alone.

    `ends` are the offsets that the replay has to reach on its way to its topics' ends; if it is `bounded`, sources read
    nothing past them. `generations` are those of the run that is repeated: its batches say what it looked up. `replan`
    checks each batch before it runs. Sources end batches at the `steps`, as far as one source can, so that few batches
    are planned anew. `external` None: corrected records are written. `name` is the name of Spark's log file, if it is
    not the stream's. `runtime` is Spark that runs already, and stays.
    """

    settings: Settings
    stream: Stream
    archives: Archives
    ends: TopicOffsets
    generations: Sequence[Generation]
    bounded: bool = False
    replan: Replan | None = None
    steps: Sequence[TopicOffsets] = ()
    external: ExternalSinks | None = None
    name: str | None = None
    runtime: Runtime | None = None

    def run(self, watch: Watch) -> ReplayResult:
        until = self.ends if self.bounded else None
        queries = SparkQueries(
            self.settings,
            self.replan,
            archives=self.archives,
            until=until,
            steps=self.steps,
            external=self.external,
            lookups=first_run(self.archives.settings, self.stream, self.generations, self._begins()),
        )
        runtime = self.runtime or (None if self.name is None else spark_named(self.settings, self.name))
        session = Session(self.settings, [self.stream], trigger="available-now", queries=queries, runtime=runtime)
        over, raised = threading.Event(), list[RecourseError]()
        watcher = threading.Thread(target=_watch, args=(session, watch, over, raised), daemon=True)
        watcher.start()
        try:
            code = session.run()
        finally:
            over.set()
            watcher.join()
        if raised:
            raise raised[0]
        if code:
            return ReplayResult(None, failure_of(session.running[0] if session.running else None))
        last = last_entry(self.settings, self.stream)
        return ReplayResult(last, missed_end(ends_of(last.offsets), self.ends, exactly=self.bounded))

    def _begins(self) -> TopicOffsets:
        """Where it begins, or goes on after a crash."""
        record = stream_record.load(self.settings, self.stream.name)
        if record is None:
            return {}
        checkpoint = StreamFolder.of(self.settings, self.stream.name).checkpoint(record.generation)
        last = checkpoint.last_committed
        return record.starts if last is None else checkpoint.end(last)


def _watch(session: Session, watch: Watch, over: threading.Event, raised: list[RecourseError]) -> None:
    while not raised and not over.wait(_LOOK_EVERY):
        for running in list(session.running):
            if running.pipeline is None:
                continue
            try:
                watch(running, running.status.batch)
            except RecourseError as error:
                raised.append(error)
                session.stop_all.set()


def spark_named(settings: Settings, log_name: str) -> LocalSpark:
    """Spark whose log file has a name of its own: a session gives it that of its stream, which may run meanwhile."""
    return LocalSpark(settings, launch=partial(launch_as, log_name))


def launch_as(log_name: str, settings: Settings, **options: Any) -> Launched:
    return spark.launch(settings, **{**options, "name": log_name})


def failure_of(running: StreamRunner | None) -> ReplayFailure:
    """The failure of a session, from the status of its stream (None: the stream was never started)."""
    error = (running.status.error if running is not None else None) or {}
    code, never_began = error.get("code", ""), running is None or running.pipeline is None
    return ReplayFailure(
        code,
        error.get("found", "see its log"),
        error.get("next", ""),
        permanent=error.get("permanent", False),
        starts=not never_began and code not in (PreflightRefused.code, OutputMismatch.code),
    )


def last_entry(settings: Settings, stream: Stream) -> LedgerEntry:
    """The ledger entry of a replay's last batch, by the replay's settings; raises PermanentError if there is none."""
    newest = entries(store_of(stream.primary).commits(settings, stream.primary), 1)
    if not newest or newest[0][1].batch < 0:
        raise PermanentError("the replay wrote no batch", "the topic holds no records; abort the plan")
    return newest[0][1]


def missed_end(reached: TopicOffsets, wanted: TopicOffsets, *, exactly: bool) -> ReplayFailure | None:
    """The failure of a replay that ended before (`exactly`: or after) its end in a partition; None if none did.

    A bounded replay has to end exactly at its end: a later record would be in the tables twice.
    """
    at, ends = by_place(reached), by_place(wanted)
    short = [place for place, end in ends.items() if at.get(place, 0) < end]
    beyond = [place for place, end in ends.items() if exactly and at.get(place, 0) > end]
    for place in (*short, *beyond):
        (topic, partition), how = place, "before" if short else "after"
        return ReplayFailure(
            PreflightRefused.code,
            f"the replay ended at {at.get(place, 0)} of topic {topic}, partition {partition}, {how} where it was to "
            f"end, {ends[place]}{': records are missing from the topic' if short else ''}",
            "see whether the topic still has these records",
        )
    return None


@dataclass(frozen=True)
class Border:
    """Called before each batch of a replay; returns True if it wrote the batch's entry anew.

    `steps` are offsets at which a batch has to end, in order; at the last one `at_border` is called. With `empty_last`
    the last batch of the published tables had no records, so the replay needs such a batch at the border too. No batch
    gets more than `largest` offsets, apart from the content of `tables` that it reads from version 0 on: one batch.
    A batch reads the versions of a range in `undivided` as one, by table.
    """

    steps: tuple[TopicOffsets, ...]
    empty_last: bool
    largest: int
    at_border: Callable[[], None]
    tables: frozenset[str] = frozenset()
    undivided: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def at(
        cls,
        ends: TopicOffsets,
        before: TopicOffsets | None,
        stream: Stream,
        settings: Settings,
        at_border: Callable[[], None],
        undivided: Mapping[str, tuple[int, int]] | None = None,
    ) -> Border:
        """The border at `ends`; `before` is where the last batch of the published tables began.

        `before` counts under a watermark only; None if the stream keeps no state, or if it is not known.
        """
        watermark = any(topic.event_time is not None for topic in stream.sources.values())
        steps: tuple[TopicOffsets, ...] = (ends,)
        empty_last = False
        if watermark and before is not None and set(by_place(before)) == set(by_place(ends)):
            empty_last = by_place(before) == by_place(ends)
            steps = (ends,) if empty_last else (before, ends)
        largest = settings.for_stream(stream.name).max_offsets_per_trigger
        tables = frozenset(table.name for table in stream.tables_read)
        return cls(steps, empty_last, largest, at_border, tables, undivided or {})

    def __call__(self, checkpoint: Checkpoint, batch: int) -> bool:
        """Check the batch that is about to run, and limit its end if necessary."""
        start, end = by_place(checkpoint.start(batch)), by_place(checkpoint.end(batch))
        border = by_place(self.steps[-1])
        if set(end) != set(border) or any(start.get(place, 0) > offset for place, offset in border.items()):
            return False  # a new partition, or past the border
        if all(start.get(place, 0) == offset for place, offset in border.items()):
            again = self._ended_here_before(checkpoint, batch)
            if self.empty_last and not again and end != border:
                return self._rewrite(checkpoint, batch, border)
            if again if self.empty_last else not again:
                self.at_border()
            return False
        target = next(
            step for step in map(by_place, self.steps) if any(start.get(place, 0) < step[place] for place in step)
        )
        if all(end[place] <= offset for place, offset in target.items()):
            return False
        return self._rewrite(checkpoint, batch, self._share(start, target))

    def _ended_here_before(self, checkpoint: Checkpoint, batch: int) -> bool:
        """True if the batch before, which ended at the border, began there too."""
        try:
            return batch > 0 and by_place(checkpoint.start(batch - 1)) == by_place(self.steps[-1])
        except PreflightRefused:  # the checkpoint begins with the batch before: a savepoint at the border
            return False

    def _share(self, start: Mapping[Place, int], target: Mapping[Place, int]) -> dict[Place, int]:
        """The end of a batch from `start` towards `target` with at most `largest` offsets."""
        begins = {place: self.undivided.get(place[0], (0, 0))[0] for place in target if place[0] in self.tables}
        whole = {place for place, begin in begins.items() if start.get(place, 0) in (0, begin)}
        left = {place: max(end - start.get(place, 0), 0) for place, end in target.items() if place not in whole}
        total = sum(left.values())
        if total <= self.largest:
            return dict(target)
        shares = {place: each * self.largest // total for place, each in left.items()}
        if not any(shares.values()):
            shares[max(left, key=lambda place: left[place])] = 1
        ends = {place: end if place in whole else start.get(place, 0) + shares[place] for place, end in target.items()}
        for place, at in ends.items():
            begin, end = self.undivided.get(place[0], (0, 0))
            if place in begins and place not in whole and begin < at < end:
                ends[place] = begin
        return ends

    def _rewrite(self, checkpoint: Checkpoint, batch: int, ends: Mapping[Place, int]) -> bool:
        text = checkpoint.entry_ending_at(batch, by_topic(ends))
        log = checkpoint.folder / "offsets"
        (log / f".{batch}.crc").unlink(missing_ok=True)  # Hadoop's checksum is that of the old text
        if isinstance(log, Path):
            write_atomic(log / str(batch), text)
            sync(log)
        else:
            (log / str(batch)).write_bytes(text.encode())
        return True


@dataclass(frozen=True)
class RowByRow:
    """Called before each batch of a bounded replay: its code must make each row of one record, and keep no state."""

    replay_settings: Settings
    stream: Stream

    def __call__(self, checkpoint: Checkpoint, batch: int) -> bool:  # noqa: ARG002 - of any batch
        """False: no batch is planned anew. Raises PreflightRefused if rows may depend on earlier records."""
        record = stream_record.existing(self.replay_settings, self.stream.name)
        nodes = output_plans.nodes(
            StreamFolder.of(self.replay_settings, self.stream.name).output_plans,
            {code.hash for code in record.code[-1:]},
        )
        if others := not_row_by_row(nodes, len(self.stream.sources)):
            raise PreflightRefused(
                f"the code of stream {self.stream.name} has operators that keep state, or may keep it: "
                f"{', '.join(others)}",
                "rows after the end of a bounded recovery may depend on records before it: plan again without --until",
            )
        return False
