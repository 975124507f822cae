"""The part of a recovery that runs while its streams run: the replay catches up beside them, and is compared there.

    prepare, follow, compare    the streams run, with the code that they have
    take_savepoint ...          the streams stop, and the replay reads what is left

The replay never overtakes the stream. Each round ends where a batch of the stream has ended, which is not its newest
one: so the last round, after the stop, has a batch that ends where the published tables end, and begins where their
last batch began. After a round, published and staging tables are of the same records, and can be compared.

Records for topics wait in files meanwhile, since readers would read them at once (`staged_records.py`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

from reprocessing.plan.plan import RecoveryPlan
from reprocessing.replay.session import Border, launch_as
from reprocessing.stages.recovery import Recovery, RecoveryContext
from reprocessing.stages.replay import run_to
from reprocessing.stages.staged_records import records_staged
from reprocessing.stages.void_ranges import refuse_new_readers
from streaming_jobs.errors import PermanentError, PreflightRefused
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.ledger.positions import TopicOffsets, by_place, ends_of, offsets_between, starts_of
from streaming_jobs.platform.runtime import ExistingSpark, LocalSpark, Runtime
from streaming_jobs.platform.spark import Launched
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.runtime.batch_hooks import Replan
from streaming_jobs.runtime.stream_sinks import StagedSinks
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import StoredTable
from streaming_jobs.sinks.tables import all_tables, copied_table, existing_table, remove_tables
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.lease import holder
from streaming_jobs.state.ledger_file import LedgerFile, LedgerLine
from streaming_jobs.state.requests import READY, STAND_BY
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted

CLOSE = 15.0
"""A round of fewer seconds than this is the last one: what came meanwhile is read in no more."""
_STALLED = 3
"""Rounds in a row that are no shorter than the round before them: the replay cannot catch up."""
_NEWEST = 20
"""Batches of the stream among which one with records is looked for."""
_NICENESS = 10
"""That of the replay's JVM and Python processes: the running streams come first."""
_LONGEST_PAUSE = 10.0
_SLOWER, _AS_FAST, _STEP = 1.25, 1.1, 0.8
"""How much slower a running stream's batches may become; below the second bound the replay has more of the time."""
_BEFORE, _MEANWHILE, _FEWEST = 30, 15, 5
"""Batches of a running stream: looked at, compared before and meanwhile, and the fewest that say anything."""
_LOOK_EVERY = 0.2
_PUBLISHED = "_published"
_READY_WITHIN = 30.0
"""Seconds for which the sessions of the streams may load the code and start Spark, while the streams run."""


class CannotCatchUp(PermanentError):
    """The replay of a recovery is no faster than its stream, so the stream would run ahead of it for ever.

    Let the replay have more of the time (`recovery.pace`) and continue: `recourse recover resume PLAN`; or stop the
    stream first: `recourse recover resume PLAN --stop-first`.
    """

    code = "REC-047"


def reason_to_stop_first(plan: RecoveryPlan) -> str | None:
    """Why the plan's streams cannot run while they are replayed, in words; None if at least one of them can."""
    for each in plan.streams:
        if each.skips:
            return "nothing is replayed"
        if each.until is not None:
            return "a bounded recovery adds the rows that the stopped stream has"
    return None if plan.followed else f"stream {plan.streams[0].stream} reads tables"


def streams_run(settings: Settings, plan: RecoveryPlan) -> bool:
    """True if a session runs one of the plan's streams: only then is there something to keep fresh meanwhile."""
    owners = (holder(settings, name) for name in plan.names)
    return any(owner is not None and owner.purpose == "session" for owner in owners)


@dataclass(frozen=True)
class Goal:
    """The end of a round: that of a batch of the stream, which began at `began`."""

    batch: Txn
    began: TopicOffsets
    ends: TopicOffsets


def goal_of(context: RecoveryContext) -> Goal | None:
    """The newest batch with records that is not the stream's last one; None if the replay starts after it."""
    lines = ledger_file(context.settings, context.stream.name).after(context.stream.name, None, at_most=_NEWEST)
    batches = [line.entry for line in lines if line.entry.kind == "batch"]
    for entry in batches[1:]:
        if entry.generation == context.plan.saw.generation and any(each.records for each in entry.offsets):
            goal = Goal(entry.txn, starts_of(entry.offsets), ends_of(entry.offsets))
            return goal if _begins_before(context.plan.base.ends, goal.ends) else None
    return None


def _begins_before(begin: TopicOffsets, ends: TopicOffsets) -> bool:
    begins = by_place(begin)
    return all(begins.get(place, 0) <= end for place, end in by_place(ends).items()) and begin != ends


def follow(context: RecoveryContext) -> Mapping[str, Any]:
    """Replay in rounds until a round is short; returns the findings of the stage, also of a round that did nothing.

    Raises CannotCatchUp, PreflightRefused if a recovery or a start anew has moved the stream meanwhile, UsageError if
    another stream has begun to read what the plan changes, and the failure of a session.
    """
    began, rounds, stalled, before, records = time.monotonic(), 0, 0, float("inf"), 0
    live = LiveBatches.of(context)
    refuse_new_readers(context)  # now as well as after the stop
    while True:
        if (goal := goal_of(context)) is None:
            raise PreflightRefused(
                f"stream {context.stream.name} has no batch any more that its replay could follow",
                f"give the plan up: {commands.abort(context.plan.id)}; then make a new one",
            )
        started = time.monotonic()
        if _position(context) != by_place(goal.ends):
            border, kept = _border(context, goal), StagedSinks(context.staged_records)
            replan = Paced(border, context.settings.recovery.pace, live.slow_down if not stalled else None)
            _, records = run_to(context, goal.ends, replan, border.steps, bounded=True, external=kept)
            rounds += 1
        took = time.monotonic() - started
        if took < CLOSE:
            break
        stalled = stalled + 1 if took >= before else 0
        if stalled == _STALLED:
            raise CannotCatchUp(
                f"the replay of stream {context.stream.name} does not catch up: the last rounds took longer each, "
                f"{took:.0f} s at last",
                f"raise recovery.pace ({context.settings.recovery.pace:g} now) and resume: "
                f"{commands.resume(context.plan.id)}; or stop the stream first: "
                f"{commands.resume(context.plan.id)} --stop-first",
            )
        before = took
        context.events.tell(f"  follow: as far as {goal.batch}, in {took:.0f} s; once more")
    return {
        "generation": goal.batch.generation,
        "batch": goal.batch.batch,
        "ends": {topic: {str(p): end for p, end in each.items()} for topic, each in goal.ends.items()},
        "rounds": rounds,
        "records": records,
        "seconds": round(time.monotonic() - began, 1),
    }


def _position(context: RecoveryContext) -> dict[tuple[str, int], int] | None:
    """Where the replay is, by its own checkpoint; None before its first batch."""
    checkpoint = StreamFolder.of(context.replay_settings, context.stream.name).checkpoint(context.plan.generation)
    last = checkpoint.last_committed
    return None if last is None else by_place(checkpoint.end(last))


def _border(context: RecoveryContext, goal: Goal) -> Border:
    """As in the replay after the stop: with state, a batch of the replay begins where that of the stream began."""
    return Border.at(
        goal.ends,
        goal.began if context.plan.stateful else None,
        context.stream,
        context.replay_settings,
        lambda: None,
    )


@dataclass(frozen=True)
class LiveBatches:
    """The durations of a running stream's batches, by its ledger: how much slower they have become meanwhile.

    `before` are the seconds of the last ones before `since`, in seconds since 1970, and `largest` their most records.
    """

    ledger: LedgerFile
    stream: str
    since: float
    before: Sequence[float]
    largest: int

    @classmethod
    def of(cls, context: RecoveryContext) -> LiveBatches:
        """Compared with the batches before this stage was begun first, so that a replay that is resumed knows them."""
        ledger, stream = ledger_file(context.settings, context.stream.name), context.stream.name
        since = context.journal.first_begun("follow") or time.time()
        newest_first = (raw.read() for day in ledger.days(stream) for raw in reversed(day))
        lines = list(islice((each for each in newest_first if each.at < since and _is_timed(each)), _BEFORE))
        largest = max((each.entry.records for each in lines), default=0)
        return cls(ledger, stream, since, [each.seconds or 0.0 for each in lines], largest)

    def slow_down(self) -> float | None:
        """The median of the newest batches by that of those before; None if there are too few to say.

        Larger batches than before are left out: they take longer for a reason of their own.
        """
        newest = self.ledger.after(self.stream, None, at_most=_MEANWHILE)
        meanwhile = [each for each in newest if each.at >= self.since and _is_timed(each)]
        seconds = [each.seconds or 0.0 for each in meanwhile if each.entry.records <= self.largest]
        if min(len(seconds), len(self.before)) < _FEWEST or not (usual := median(self.before)):
            return None
        return median(seconds) / usual


def _is_timed(line: LedgerLine) -> bool:
    """True for a batch with records and a known duration."""
    return line.entry.kind == "batch" and line.seconds is not None and line.entry.records > 0


@dataclass
class Paced:
    """Pauses before each batch of a replay, so that it works for no more than a share of the time.

    The share is the pace. It becomes smaller, down to half of it, while the running stream's batches are slower than
    before by more than `_SLOWER`, and larger again when they are not; `slow_down` says how much slower they are. With a
    pace of 1 the replay never waits. No pause is longer than ten seconds: a query that is to stop waits for it.
    """

    then: Replan | None
    pace: float
    slow_down: Callable[[], float | None] | None = None
    _share: float | None = None
    _since: float | None = None

    def __call__(self, checkpoint: Checkpoint, batch: int) -> bool:
        if self._since is not None:
            worked = time.monotonic() - self._since
            time.sleep(min(worked * (1 / self._next_share() - 1), _LONGEST_PAUSE))
        self._since = time.monotonic()
        return self.then is not None and self.then(checkpoint, batch)

    def _next_share(self) -> float:
        share = self.pace if self._share is None else self._share
        slower = self.slow_down() if self.slow_down is not None and self.pace < 1 else None
        if slower is not None and slower > _SLOWER:
            share = max(share * _STEP, self.pace / 2)
        elif slower is None or slower < _AS_FAST:
            share = min(share / _STEP, self.pace)
        self._share = share
        return share


def published_then(context: RecoveryContext) -> dict[str, StoredTable]:
    """The published tables as they were after the batch up to which the replay has followed, as tables in staging."""
    found = context.result("follow")
    upto, tables = Txn(found["generation"], found["batch"]), {}
    folder = context.beside(_PUBLISHED)
    remove_tables(folder, context.stream)
    for declared, _ in all_tables(context.stream):
        table = existing_table(context.settings, declared, context.stream.name)
        commits = (c for c in table.commits() if c.moves(context.stream.name))
        at = next((c for c in commits if c.entry is not None and c.entry.txn <= upto), None)
        content = table.no_rows() if at is None else table.content(at.version)
        copied_table(context.replay_settings, folder, declared, context.stream.name, content)
        tables[declared.name] = context.rebuilt_table(declared, _PUBLISHED)
    return tables


@contextmanager
def warm_spark(recovery: Recovery) -> Iterator[None]:
    """Within the block the replays of a recovery share one Spark, which the first of them starts, with low priority.

    It ends with the block, and with this process.
    """
    started: list[LocalSpark] = []

    def runtime() -> Runtime:
        settings = recovery.each()[0].replay_settings
        if started and started[0].failure() is not None:
            started.pop().kill()
        if not started:
            name = f"replay-{recovery.plan.names[0]}"
            begun = LocalSpark(settings, launch=partial(_with_low_priority, name))
            try:
                begun.start(name)
            except BaseException:
                begun.kill()
                raise
            started.append(begun)
        return ExistingSpark(settings, started[0].session)

    recovery.warm = runtime
    try:
        yield
    except BaseException:
        for each in started:
            each.kill()
        raise
    else:
        for each in started:
            each.stop()
    finally:
        recovery.warm = None


def _with_low_priority(log_name: str, settings: Settings, **options: Any) -> Launched:
    """Launch the JVM from a thread of low priority: on Linux it, and what it starts, inherit that of the thread."""
    launched: list[Launched] = []
    failed: list[BaseException] = []

    def launch() -> None:
        try:
            os.nice(_NICENESS)
            launched.append(launch_as(log_name, settings, **options))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            failed.append(error)

    thread = threading.Thread(target=launch, name="launch")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return launched[0]


def stand_by(recovery: Recovery) -> None:
    """Let the sessions of the streams, which run meanwhile, prepare their next start, and wait until they have.

    A session that nobody supervises does not answer, and starts nothing: then the wait ends at its deadline.
    """
    settings, deadline = recovery.settings, time.monotonic() + _READY_WITHIN
    for name in recovery.plan.names:
        STAND_BY.ask(settings, name, f"recovery plan {recovery.plan.id}")
    while time.monotonic() < deadline:
        requests = [STAND_BY.request(settings, name) for name in recovery.plan.names]
        if all(request is None or request.who == READY for request in requests):
            break
        time.sleep(_LOOK_EVERY)


def stand_down(recovery: Recovery) -> None:
    """Withdraw the requests to stand by."""
    for name in recovery.plan.names:
        if (request := STAND_BY.request(recovery.settings, name)) is not None:
            STAND_BY.clear(recovery.settings, name, request)


def left_words(context: RecoveryContext, goal: TopicOffsets) -> str:
    """The records that the stream has read past the goal, and those that wait for topics, in words."""
    lines = ledger_file(context.settings, context.stream.name).after(context.stream.name, None, at_most=1)
    left = offsets_between(goal, ends_of(lines[0].entry.offsets)) if lines else 0
    waiting = f"; {counted(records_staged(context), 'staged record')} for topics" if context.plan.wrong_from else ""
    return f"{counted(left, context.plan.unit)} behind the stream{waiting}"
