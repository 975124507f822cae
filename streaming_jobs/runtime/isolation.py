"""The records of a batch on which the stream's function raises: found by running the function on parts of the batch.

Spark reports that a batch failed, not on which record: a plan is lazy, and an expression such as a cast runs in the
JVM. So the function runs on parts of the batch's offsets until single ones are left. All records are read and decoded
once, and kept meanwhile.

    a run raises
      near some offsets?      these raise: look there, and note the others as not known yet
      else, first half        raises: look there, and note the second half as not known yet
                              does not raise: look in the second half
      ...
      one offset              raises alone, right after a run that stopped there, or twice: set it aside
      what is not known yet, all at once: raises? then the same again, without the records that are set aside

If the records fit the driver's memory, each run is one job of a plan that Spark makes once, and says where it stopped
(`planned_once.py`), as the batch itself does: one record takes one run, with Python code two or three. With halves
alone it takes log2(n) + 3. Without state, the repeated batch is the last run. A service that does not answer is no
reason to set a record aside, so an error of a connection ends the search. So does the error budget
(`declare/error_policy.py`): a bug raises on every record.

Without state, a run is the whole function. With state, it is the part ahead of the first operators that keep any
(`stateless_part.py`): what these make of a record depends on other ones. Then Spark's own plan of the batch runs again,
on the other records (`QueryHandle.send_anew`); where it cannot, the query begins again.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import structlog

from streaming_jobs.declare.error_policy import ErrorPolicy
from streaming_jobs.errors import FunctionFailed, FunctionRaised, RecourseError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.platform.failures import classify, with_traceback
from streaming_jobs.runtime.kept_records import KeptRecords
from streaming_jobs.runtime.output_frames import fitted_outputs, run, run_small
from streaming_jobs.runtime.planned_once import ROW_BY_ROW, PlannedOnce, RowsCounted, Stopped, size
from streaming_jobs.runtime.stateless_part import stateless_parts
from streaming_jobs.sinks.base import SinkSet
from streaming_jobs.sources.base import Span
from streaming_jobs.state.set_aside import RaisingRecord, SetAside, SetAsideFile, Spent
from streaming_jobs.stream import Stream
from streaming_jobs.text.spelling import counted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from streaming_jobs.sources.base import SourceCounts
    from streaming_jobs.sources.kafka import KafkaSource


log = structlog.get_logger()

# The search, on the numbers 0 to n - 1.


@dataclass(frozen=True)
class Failure:
    """What a run of the function raised, and near which numbers, if that is known."""

    error: FunctionRaised
    near: Sequence[Span] = ()


Raises = Callable[[Sequence[Span]], Failure | None]
"""Runs the function on the records of some spans; None if it does not raise."""
Found = Mapping[int, FunctionRaised]
"""What numbers raise alone."""
_SAMPLES = 8


class TooManyRaise(Exception):
    """The function raises on more records than may be set aside."""

    def __init__(self, found: int, error: FunctionRaised) -> None:
        super().__init__(found)
        self.found = found
        self.error = error


def raising(
    count: int,
    raises: Raises,
    allowed: int,
    *,
    first: Failure | None = None,
    within: Sequence[Span] = (),
    completes: Callable[[Found], bool] = lambda _: False,
) -> dict[int, FunctionRaised]:
    """The numbers below `count` that raise alone, two runs in a row, each with its error; raises TooManyRaise.

    The run of the batch counts as one of the two where it says that it has stopped at a single number. `first` is what
    all of them raise, or those `within` some spans, near which the batch itself has stopped.
    `completes` runs the batch without a number that was found, true if it does not raise. Ends where a number that
    raised with others does not raise alone: then the rest is not reproducible.
    """
    found: dict[int, FunctionRaised] = {}
    suspects, others = _split([(0, count)], within or [(0, count)])
    failure, error = first, first.error if first is not None and others else None
    while suspects:
        number, unknown, error = _narrowed(suspects, failure, error, raises)
        unknown, others = [*unknown, *others], []
        if error is None:
            alone = [(number, number + 1)]
            if raises(alone) is None or (failure := raises(alone)) is None:
                break
            error = failure.error
        found[number] = error
        if len(found) > allowed:
            raise TooManyRaise(len(found), error)
        if len(found) == 1 and completes(found):
            break
        if not unknown or (failure := raises(unknown)) is None:
            break
        if len(found) == 1 and size(unknown) > allowed and _all_raise(unknown, raises):
            raise TooManyRaise(1 + _SAMPLES, error)
        suspects, error = unknown, None
    return found


def _narrowed(
    suspects: Sequence[Span], failure: Failure | None, error: FunctionRaised | None, raises: Raises
) -> tuple[int, list[Span], FunctionRaised | None]:
    """A number of the suspects, which raise together, and the spans beside it that may raise too.

    With its error if it raised alone, right after a run that stopped there: `error` is that of the suspects. A run that
    stopped elsewhere than it said is the last one that is believed.
    """
    unknown: list[Span] = []
    believed = True
    while (count := size(suspects)) > 1:
        part, others = _split(suspects, failure.near if failure is not None and believed else ())
        if told := 0 < size(part) < count:
            believed = (failure := raises(part)) is not None
        else:
            part, others = _parted(suspects, count // 2)
            failure = raises(part)
        if failure is None:
            suspects, error = others, None
        else:
            suspects, unknown = part, [*others, *unknown]
            error = failure.error if told else None
    return suspects[0][0], unknown, error


def _split(spans: Sequence[Span], near: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """The numbers of the spans that are in `near`, and the others."""
    inside, outside = [], []
    for begin, end in spans:
        at = begin
        for low, high in sorted(near):
            low, high = max(low, at), min(high, end)
            if low < high:
                outside += [(at, low)] if at < low else []
                inside.append((low, high))
                at = high
        outside += [(at, end)] if at < end else []
    return inside, outside


def _all_raise(suspects: Sequence[Span], raises: Raises) -> bool:
    """True if each of some numbers, spread over the suspects, raises alone."""
    step = max(size(suspects) // _SAMPLES, 1)
    for index in range(min(_SAMPLES, size(suspects))):
        _, rest = _parted(suspects, index * step)
        if raises([(rest[0][0], rest[0][0] + 1)]) is None:
            return False
    return True


def _parted(spans: Sequence[Span], count: int) -> tuple[list[Span], list[Span]]:
    """The first `count` numbers of the spans, and the others."""
    first: list[Span] = []
    for index, (begin, end) in enumerate(spans):
        if count < end - begin:
            return [*first, *([(begin, begin + count)] if count else [])], [(begin + count, end), *spans[index + 1 :]]
        first.append((begin, end))
        count -= end - begin
    return first, []


_REPORTS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""PySpark's loggers of each exception with its stack trace: a batch that is searched has ten of them."""


_QUIET = threading.local()


def _is_reported(_: object) -> bool:
    return not getattr(_QUIET, "within", False)


@contextmanager
def unreported() -> Iterator[None]:
    """PySpark writes no stack traces of exceptions of this thread meanwhile."""
    from pyspark.logger import PySparkLogger

    for name in _REPORTS:
        PySparkLogger.getLogger(name).addFilter(_is_reported)  # once; a plain logger would not take PySpark's calls
    before, _QUIET.within = _is_reported(None), True
    try:
        yield
    finally:
        _QUIET.within = not before


def _raised(run: Callable[[], Stopped | None]) -> Failure | None:
    """What the function raises in a run; raises any other error, such as that of a connection."""
    try:
        stopped = run()
    except Exception as error:  # noqa: BLE001 - judged below
        stopped = Stopped(error)
    if stopped is None:
        return None
    if isinstance(found := classify(stopped.error), FunctionRaised):
        return Failure(found, stopped.near)
    raise found from stopped.error


def _stopped_within(
    kept: KeptRecords, planned: PlannedOnce | None, counted: RowsCounted | None, raised: FunctionRaised
) -> list[Span]:
    """Where the batch itself has stopped, by what it `counted`; empty if not known, or not so well that it helps."""
    error = raised.__cause__
    if planned is None or counted is None or not isinstance(error, Exception):
        return []
    near, _ = _split([(0, len(kept.places))], planned.near(kept.counted(counted), error))  # each record once
    return near if size(near) <= ROW_BY_ROW else []


Runs = Callable[[Mapping[str, "DataFrame"]], Sequence["DataFrame"]]
"""The frames to run for these records: the outputs in the columns of their sinks, or what is ahead of the state."""


Staged = TypeVar("Staged")


@dataclass(frozen=True)
class Isolated(Generic[Staged]):
    """The batch without the records that are set aside: its rows, and the counts of its sources."""

    staged: Staged
    counts: Mapping[str, SourceCounts]


def _again(
    again: Callable[[Mapping[str, DataFrame]], Staged | None] | None,
    kept: KeptRecords,
    aside: Sequence[RaisingRecord],
) -> Isolated[Staged] | None:
    """The batch staged from its own plan, with state."""
    if again is None or not kept.is_small([(0, len(kept.places))]):
        return None
    staged = again(kept.refusing(aside))
    return None if staged is None else Isolated(staged, kept.counts(aside))


@dataclass
class Isolation:
    """Sets records of a stream's batches aside. `in_replay`: a budget per time holds for each batch instead."""

    stream: str
    policy: ErrorPolicy
    file: SetAsideFile
    sources: Sequence[KafkaSource]
    """The stream's sources without the records that are set aside."""
    runs: Runs
    aside: SetAside
    in_replay: bool = False
    clock: Callable[[], float] = time.time
    _planned_before: PlannedOnce | None = field(default=None, init=False)
    """The frames as they were planned for an earlier batch."""

    @classmethod
    def of(
        cls,
        stream: Stream,
        file: SetAsideFile,
        aside: SetAside,
        sources: Sequence[KafkaSource],
        sinks: SinkSet,
        lookups: Mapping[str, DataFrame],
        *,
        stateful: bool,
        in_replay: bool,
    ) -> Isolation:
        topics = [source.name for source in sources]

        def outputs(records: Mapping[str, DataFrame]) -> Sequence[DataFrame]:
            return list(fitted_outputs(stream, sinks, stream.outputs(**records, **lookups), topics).values())

        def ahead_of_state(records: Mapping[str, DataFrame]) -> Sequence[DataFrame]:
            return stateless_parts(stream, {**records, **lookups})

        runs = ahead_of_state if stateful else outputs
        return cls(stream.name, stream.errors, file, sources, runs, aside, in_replay)

    def isolate(
        self,
        spark: SparkSession,
        entry: LedgerEntry,
        raised: FunctionRaised,
        held: ExitStack,
        check_lease: Callable[[], None],
        *,
        in_driver: bool,
        counted: RowsCounted | None,
        repeat: Callable[[Sequence[DataFrame]], Staged] | None = None,
        again: Callable[[Mapping[str, DataFrame]], Staged | None] | None = None,
    ) -> Isolated[Staged] | None:
        """Set aside the records on which the function raises; the list is durable when this returns.

        `in_driver`: the records fit the driver's memory. `counted`: the rows, by topic, that the batch has handed out
        until it raised; None if that is not known. Without state, `repeat` stages frames of the batch without them,
        which nobody sees yet: that is the last run of the search. With state, `again` stages the batch from its
        records in the driver's memory, by topic; None if it cannot, and then the result is None.

        Raises `raised` if no record raises alone, FunctionFailed if more do than the budget allows, and the error of a
        connection.
        """
        began = time.monotonic()
        kept = KeptRecords.of(spark, self.sources, entry.offsets, held, in_driver=in_driver)
        places = kept.places
        before = self.aside.of(entry.txn)
        runs = 0
        isolated: Isolated[Staged] | None = None

        def raises(spans: Sequence[Span]) -> Failure | None:
            nonlocal runs
            runs += 1
            return _raised(lambda: run_part(spans))

        def records_of(found: Found) -> tuple[RaisingRecord, ...]:
            return tuple(RaisingRecord(*places.at(number), with_traceback(error)) for number, error in found.items())

        def stage(found: Found) -> None:
            nonlocal isolated
            if repeat is not None:
                numbers = sorted(found)
                spans = list(zip([0, *(number + 1 for number in numbers)], [*numbers, len(places)], strict=True))
                frames = self.runs(kept.within(spans)) if planned is None else planned.frames(spans)
                isolated = Isolated(repeat(frames), kept.counts(records_of(found)))

        def completes(found: Found) -> bool:
            return _raised(lambda: stage(found)) is None and isolated is not None

        allowed = self.allowed(entry.txn, len(places)) - len(before)
        try:
            with unreported():
                planned = self._planned(kept)
                run_part = self._run_part_of(kept) if planned is None else planned.run
                within = _stopped_within(kept, planned, counted, raised)
                first = raises(within) if within else None
                if planned is not None and first is None:
                    first = raises(within := [(0, len(places))])
                found = dict[int, FunctionRaised]()
                if planned is None or first is not None:
                    found = raising(len(places), raises, allowed, first=first, within=within, completes=completes)
        except TooManyRaise as many:
            raise self._too_many(many, entry.txn, len(places)) from raised
        if not found:
            raise FunctionRaised(
                f"{raised.found}; no record of the batch raises it alone", raised.next_step, raised.origin
            ) from raised
        records = records_of(found)
        for record, error in zip(records, found.values(), strict=True):
            log.warning(
                "record set aside",
                stream=self.stream,
                batch=entry.batch,
                topic=record.topic,
                partition=record.partition,
                offset=record.offset,
                error=error.found,
            )
        check_lease()
        self._save(
            replace(
                self.aside,
                generation=entry.generation,
                batch=entry.batch,
                action="drop" if self.policy.function == "drop" else "dead_letter",
                records=(*before, *records),
            )
        )
        self.sources = [replace(s, aside=self.aside.of_topic(s.name)) for s in self.sources]
        log.info("batch searched", stream=self.stream, batch=entry.batch, runs=runs, seconds=time.monotonic() - began)
        if isolated is None:
            stage(found)
        self._planned_before = None if planned is None else planned.without_records()
        return isolated or _again(again, kept, records)

    @property
    def counts_all(self) -> bool:
        """True if the budget counts the failures of all layers, not those of the function alone."""
        return self.policy.budget is not None

    def aside_of(self, txn: Txn) -> dict[str, int]:
        """The records of a batch that are set aside, by topic."""
        return dict(Counter(record.topic for record in self.aside.of(txn)))

    def allowed(self, txn: Txn, records: int) -> int:
        """The failures that the budget leaves to a batch of `records`."""
        return self.policy.bound.allowed(records, 0 if self.in_replay else self.aside.spent_since(self._since, txn))

    def spend(self, txn: Txn, number: int) -> None:
        """Note the failures of a batch, durably, if the budget is one per time."""
        if self.policy.bound.share is None and not self.in_replay:
            self._save(self.aside.spending(Spent(self.clock(), txn.generation, txn.batch, number), self._since))

    @property
    def _since(self) -> float:
        return self.clock() - self.policy.bound.within.total_seconds()

    def _planned(self, kept: KeptRecords) -> PlannedOnce | None:
        """The frames planned once for all parts; None if each part has a plan of its own."""
        before, planned, self._planned_before = self._planned_before, None, None

        def plan() -> None:
            nonlocal planned
            planned = kept.planned(self.runs, before)

        _raised(plan)  # what raises in the planner does so in a part's, too
        return planned

    def _run_part_of(self, kept: KeptRecords) -> Callable[[Sequence[Span]], None]:
        """What runs the frames on a part, planned for it."""

        def run_part(spans: Sequence[Span]) -> None:
            run_frame = run_small if kept.is_small(spans) else run
            for frame in self.runs(kept.within(spans)):
                run_frame(frame)

        return run_part

    def _save(self, aside: SetAside) -> None:
        self.file.save(aside)
        self.aside = aside

    def _too_many(self, many: TooManyRaise, txn: Txn, records: int) -> RecourseError:
        allowed = self.allowed(txn, records)
        return FunctionFailed(
            f"{many.error.found}; it raises on at least {counted(many.found, 'record')} of a batch of {records:,}, and "
            f"the error budget leaves {allowed:,}",
            "correct the function, or raise the budget in its `errors`; nothing of the batch is written or set aside",
        )
