"""The driver: one process that runs one or more streams in one Spark session.

    python -m streaming_jobs.session --streams flights_clean,carrier_totals

Order of a start: leases, then the JVM, which inherits them, meanwhile the preflight of every stream (a refusal is
shown within a second), then the queries. One stream's failure leaves the others running. The session ends
when all its streams have ended: by SIGTERM or SIGINT, by the file `<state>/<stream>/stop`, by the end of standard
input under `--supervised` (the parent is gone), or because the trigger was available-now.

Under `--supervised`, the session starts streams again: after a recovery, with corrected code, on request. Newer code
gets a process of its own, while the other streams run on (`runtime/stream_restarts.py`), or, if there are none, the
session restarts itself. Its parent sees the same process throughout.

Exit codes: 0 all stopped or finished; 1 a failure that may pass; 2 wrong usage; 75 a lease is busy; 78 every stream
that failed needs a person.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import PermanentError, RecourseError, TransientError
from streaming_jobs.platform import entry
from streaming_jobs.platform.failures import classify
from streaming_jobs.platform.runtime import LocalSpark, Runtime, existing_spark
from streaming_jobs.runtime import child_sessions, session_options
from streaming_jobs.runtime.batch_hooks import Replan
from streaming_jobs.runtime.child_sessions import ChildSessions
from streaming_jobs.runtime.code_watch import ERROR, as_line, versions
from streaming_jobs.runtime.group_offsets import GroupOffsets
from streaming_jobs.runtime.session_options import log_to_stderr
from streaming_jobs.runtime.stream_queries import Queries, SparkQueries
from streaming_jobs.runtime.stream_restarts import RestartReasons, StreamRestarts, supervision
from streaming_jobs.runtime.stream_runner import LINGERING, StreamRunner
from streaming_jobs.settings import Settings, load
from streaming_jobs.state.lease import Lease, Leases, leases_of
from streaming_jobs.state.requests import STOP, StreamRequest, stands_by
from streaming_jobs.state.status import Status, first_status, write_status
from streaming_jobs.storage.locations import StorePath, shared_root
from streaming_jobs.storage.object_store import POLLED_EVERY, refuse_broken_promises
from streaming_jobs.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# The leases of one session: all of them at the start, and each at the end as what still runs of its stream allows.


def take_all(leases: Leases, streams: Sequence[Stream], wait: float) -> list[Lease]:
    """The leases of all streams, or none; raises LeaseBusy if one is not free within `wait` seconds."""
    taken: list[Lease] = []
    with ExitStack() as unless_all:
        for stream in streams:
            taken.append(leases.acquire(stream.name, purpose="session", wait=wait))
            unless_all.callback(taken[-1].release)
        unless_all.pop_all()
    return taken


def let_go_all(held: Sequence[Lease], running: Sequence[StreamRunner], runtime: Runtime) -> None:
    """Release every lease, even if the release of another one fails."""
    with ExitStack() as each_one:
        for lease in held:
            runner = next((runner for runner in running if runner.lease is lease), None)
            each_one.callback(_let_go, lease, runner, runtime)


def _let_go(lease: Lease, runner: StreamRunner | None, runtime: Runtime) -> None:
    """Release a lease, except one whose batch still runs: the end of this process releases that one."""
    if runner is not None and runner.in_batch:
        return
    if runner is not None and not runner.detached and runtime.jvm is None:
        lease.unlock()  # the stream has left the JVM, even if the JVM runs on
    lease.release()


# The status files of a session's streams: written at least once per second, also while the session waits.

log = structlog.get_logger()

STATUS_EVERY, STATUS_EVERY_IN_STORES = 1.0, 5.0


def status_every(settings: Settings) -> float:
    """Seconds between two writes of a status."""
    return STATUS_EVERY if isinstance(settings.state, Path) else STATUS_EVERY_IN_STORES


class StatusFiles:
    """Writes the status files; one that cannot be written (the disk is full, a store is away) stops no stream."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._every = status_every(settings)
        self._unwritten = False

    def write(self, status: Status) -> bool:
        """Write one; False if that failed, which is logged once until it works again."""
        try:
            write_status(self._settings, status)
            self._unwritten = False
        except (OSError, RecourseError) as error:
            if not self._unwritten:
                log.warning("the status could not be written", stream=status.stream, reason=str(error))
            self._unwritten = True
        return not self._unwritten

    def refresh(self, running: Sequence[StreamRunner]) -> None:
        """Write the status of each stream now, except where the file belongs to another session."""
        for each in running:
            if not each.detached and each.has_lease:
                each.refresh_status()
                self.write(each.status)

    @contextmanager
    def beating(self, running: Sequence[StreamRunner]) -> Iterator[None]:
        """Keep the files fresh while the session's thread waits for the JVM and for the first plans."""
        ready = threading.Event()

        def beat() -> None:
            while not ready.wait(self._every):
                for each in filter(lambda each: each.has_lease, running):
                    each.beat()
                    self.write(each.status)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ready.set()
            thread.join()


@dataclass(frozen=True)
class Patience:
    """Waits of a session, in seconds: for a lease, between two polls of its streams, for the end of a JVM that may be
    the cause of an error, and for a batch that still runs after its query was stopped."""

    lease: float = 10.0
    look: float = 0.1
    jvm: float = 2.0
    batch: float = LINGERING


class Session:
    """The streams of this process, from leases to the end of the last one."""

    def __init__(
        self,
        settings: Settings,
        streams: Sequence[Stream],
        *,
        trigger: str | None = None,
        answers: Mapping[str, StreamRequest] | None = None,
        reasons: RestartReasons | None = None,
        left_out: Sequence[Stream] = (),
        children: ChildSessions | None = None,
        replan: Replan | None = None,
        runtime: Runtime | None = None,
        queries: Queries | None = None,
        leases: Leases | None = None,
        patience: Patience | None = None,
        standby: bool = False,
    ) -> None:
        """`answers`: stream -> the stop request that this start was made to end; `left_out`: those not started now.

        With `reasons` streams may start again, and the session may end in order to be restarted in place with newer
        code (`superseded`); with `children`, streams with newer code get processes of their own.
        `standby`: none runs yet, and Spark is started for those left out.
        The defaults are Spark that is started here, queries over Kafka, and leases in the state folder.
        Raises ValueError for `replan` together with `queries`, which have their own.
        """
        if queries is not None and replan is not None:
            raise ValueError("give replan to the queries: a session passes it only to those that it makes itself")
        self.settings = settings
        self.streams = list(streams)
        self.trigger = trigger
        self.answers = dict(answers or {})
        self.runtime: Runtime = runtime or LocalSpark(settings)
        self.queries: Queries = queries or SparkQueries(settings, replan, shown=GroupOffsets.of(settings))
        self.leases: Leases = leases or leases_of(settings)
        self.patience = patience or Patience()
        self.stop_all = threading.Event()
        self.signalled_by = ""
        """Who sends the signal to stop: one to a session without a supervisor is a person's, or the system's."""
        self.running: list[StreamRunner] = []
        self.spark: SparkSession | None = None
        self.left_out = list(left_out)
        self.held: list[Lease] = []
        self.standby = standby
        self._elsewhere: dict[str, tuple[float, bool]] = {}
        self.restarts = StreamRestarts(settings, self, reasons, children) if reasons is not None else None
        self.status_files = StatusFiles(settings)

    def run(self) -> int:
        """Run to the end and return the exit code. Raises LeaseBusy before anything is changed."""
        places = (shared_root(each) for each in (self.settings.tables, self.settings.state))
        for place in {(each.bucket, each.options): each for each in places if isinstance(each, StorePath)}.values():
            refuse_broken_promises(place.url, dict(place.options))
        self.held = leases = take_all(self.leases, self.streams, self.patience.lease)
        with ExitStack() as at_end:  # in reverse order, and each one even if another one fails
            if self.restarts is not None:
                at_end.callback(self.restarts.close)
            at_end.callback(let_go_all, self.held, self.running, self.runtime)
            at_end.callback(self._end_spark)
            at_end.callback(self.queries.close)
            at_end.callback(self.status_files.refresh, self.running)
            at_end.callback(self._say_who_ended_it)
            try:
                self._prepare(leases)
                if self.standby or any(not r.ended for r in self.running):
                    with self.status_files.beating(self.running):
                        self._start_spark(leases)
                    self._loop()
            except BaseException as error:
                reason = self.runtime.failure(self.patience.jvm) or classify(error)
                for running in self.running:
                    if not running.ended:
                        running.abandon(reason)
                if isinstance(error, Exception) and reason is not error:
                    raise reason from error
                raise
            return self._exit_code()

    def _say_who_ended_it(self) -> None:
        for running in self.running:
            if self.stop_all.is_set() and running.status.state == "stopped":
                running.status.ended_by = self.signalled_by

    @property
    def superseded(self) -> bool:
        """True if the session ends in favour of the next one in its process."""
        return self.restarts is not None and self.restarts.superseded

    @property
    def in_batch(self) -> bool:
        """True if a batch still runs in this process; it may commit until the process has ended."""
        return any(running.in_batch for running in self.running)

    def _runner(self, stream: Stream, lease: Lease) -> StreamRunner:
        """The runner of a stream; its first status is written, with the values of the last run."""
        status, lingering = first_status(self.settings, stream.name), self.patience.batch
        self.status_files.write(status)
        return StreamRunner(stream, self.settings, self.queries, lease, status, self.trigger, lingering=lingering)

    def _prepare(self, leases: Sequence[Lease]) -> None:
        for stream, lease in zip(self.streams, leases, strict=True):
            self.running.append(self._runner(stream, lease))
        with self.status_files.beating(self.running):
            self.runtime.begin(*self._spark_for(leases))
        self.queries.open([*self.streams, *self.left_out])
        for running in self.running:
            if self.stop_all.is_set():
                break
            try:
                running.preflight()
            except Exception as error:  # noqa: BLE001 - one stream's trouble leaves the others running
                running.fail(classify(error))
            if not running.ended:
                self._answer(running)
            elif self.restarts is not None:  # a start that is refused answers a request for it too
                self.restarts.started(running.stream.name)
        for running in self.running:
            if self.stop_all.is_set() and not running.ended:
                running.leave_stopped()

    def _answer(self, running: StreamRunner) -> None:
        """Clear the stop request that this start was made to end, if preflight allows the start; obey any other one."""
        name, request = running.stream.name, self.answers.get(running.stream.name)
        if request is not None and request.plan is None:
            STOP.clear(self.settings, name, request)
        if (newer := STOP.request(self.settings, name)) is not None:
            log.warning("stream not started: a stop is requested", stream=name, by=newer.who)
            running.leave_stopped()

    def _spark_for(self, leases: Sequence[Lease]) -> tuple[str, list[int]]:
        """The name of the Spark session, and the descriptors that its JVM inherits."""
        name = "-".join(s.name for s in self.streams or self.left_out)[:80]
        return f"next-{name}" if self.standby else name, [each for lease in leases for each in lease.inherited]

    def _start_spark(self, leases: Sequence[Lease]) -> None:
        self.spark = self.runtime.start(*self._spark_for(leases))
        if (jvm := self.runtime.jvm) is not None:
            for lease in leases:
                lease.record_jvm(jvm)
        if self.standby:
            from streaming_jobs.runtime.rehearsal import rehearse  # it imports NumPy, and here Spark has started

            rehearse(self.settings, self.left_out, self.spark, self._stands_by_for)
        for running in self.running:
            if not running.ended and not self.stop_all.is_set():
                running.start(self.spark)
            if self.restarts is not None:
                self.restarts.started(running.stream.name)

    def _stands_by_for(self, stream: Stream) -> bool:
        return not self.stop_all.is_set() and stands_by(self.settings, stream.name) is not None

    def _loop(self) -> None:
        assert self.spark is not None
        written = 0.0
        while any(not r.ended and not r.gave_up for r in self.running) or (self.restarts and self.restarts.busy):
            if self.can_start and (gone := self.runtime.failure()) is not None:
                raise gone
            self._check_leases()
            if self.restarts is not None:
                self.restarts.look(stopping=self.stop_all.is_set())
            for running in self.running:
                if self.stop_all.is_set() or self.superseded or STOP.asked(self.settings, running.stream.name):
                    running.request_stop()
                if self.spark is not None:
                    running.poll(self.spark)
                if running.stuck:
                    raise TransientError(
                        f"a batch of stream {running.stream.name} did not end within {self.patience.batch:g} s after "
                        "it was interrupted: the session ends with its JVM, and the next one repeats the batch",
                        "its log says what the batch waits for",
                    )
            self._detach_ended()
            if time.monotonic() - written >= status_every(self.settings):
                if self.restarts is not None:
                    self.restarts.reasons.note_disk(running.status for running in self.running)
                self.status_files.refresh(self.running)
                written = time.monotonic()
            time.sleep(self.patience.look)
        for running in self.running:
            if not running.ended:
                running.give_up()

    def _check_leases(self) -> None:
        """Raise LeaseLost if a stream has lost its lease: the session ends, and so does a batch that runs."""
        for running in self.running:
            if not running.ended and not running.detached:
                running.lease.check()

    def _detach_ended(self) -> None:
        """Give up the leases of streams that have ended, and Spark too if the others run in their own processes."""
        elsewhere = self.restarts is not None and bool(self.restarts.elsewhere)
        attached = [running for running in self.running if not running.detached]
        ended = [running for running in attached if running.ended and not running.in_batch]
        stays = elsewhere or not all(running.ended for running in attached)
        if ended and (stays or (self.restarts is not None and self.restarts.standing_by())):
            for running in ended:
                self.detach(running)
        if elsewhere and self.spark is not None and all(running.detached for running in self.running):
            log.info("no stream is left in this process: its Spark ends")
            self.runtime.stop()
            self.spark = None

    @property
    def can_start(self) -> bool:
        return self.spark is not None

    @property
    def runners(self) -> Sequence[StreamRunner]:
        return self.running

    def held_elsewhere(self, stream: str) -> bool:
        """True if another process holds the lease of a stream that is not this session's now.

        A store is asked every two seconds, and one that does not answer is taken to say yes.
        """
        if isinstance(self.settings.state, Path):
            return self.leases.holder(stream) is not None
        at, held = self._elsewhere.get(stream, (float("-inf"), True))
        if time.monotonic() - at >= POLLED_EVERY:
            try:
                held = self.leases.holder(stream) is not None
            except TransientError:
                held = True
            self._elsewhere[stream] = time.monotonic(), held
        return held

    def declared(self, stream: str) -> bool:
        """True if this session has the stream, running or not."""
        return any(stream == each.name for each in (*self.streams, *self.left_out))

    def detach(self, running: StreamRunner) -> None:
        """Give up the lease of a stream that has ended while others run, once its status is written."""
        if self.status_files.write(running.status):
            running.detached = True
            running.lease.unlock()

    def take_back(self, stream: str) -> bool:
        """Start a stream that has ended or was left out; False if another process holds its lease."""
        assert self.spark is not None
        before = next((running for running in self.running if running.stream.name == stream), None)
        if before is None:
            declared = next(each for each in self.left_out if each.name == stream)
            self.held.append(lease := self.leases.acquire(stream, purpose="session", wait=0))
        else:
            declared, lease = before.stream, before.lease
            if not lease.lock_again():
                return False
        if self.runtime.jvm is not None:
            lease.record_jvm(self.runtime.jvm)
        log.info("stream starts again", stream=stream)
        running = self._runner(declared, lease)
        if before is None:
            self.running.append(running)
        else:
            self.running[self.running.index(before)] = running
        running.start(self.spark)
        return True

    def _exit_code(self) -> int:
        if self.superseded:  # earlier failures are for the next session to report
            return 0
        failed = [r.status.error for r in self.running if r.status.state == "failed" and r.status.error]
        failed_elsewhere = self.restarts is not None and self.restarts.failed_elsewhere
        permanent = all(error["permanent"] for error in failed)
        return 0 if not (failed or failed_elsewhere) else PermanentError.exit_code if permanent else 1

    def _end_spark(self) -> None:
        if self.in_batch:  # an orderly stop would wait for the batch
            self.runtime.kill()
        elif self.spark is not None or not any(running.detached for running in self.running):  # else it has ended
            self.runtime.stop()


def main(arguments: Sequence[str] | None = None, make: Callable[..., Session] = Session) -> int:
    """Entry point of the driver process; `make` makes the session."""
    log_to_stderr()
    began = time.time()
    options = session_options.parse(arguments)
    session: Session | None = None
    try:
        entry.check()
        loaded = load(session_options.flags(options), config_file=options.config)
        settings = loaded.settings
        log.info("driver", **loaded.sources)
        # Read before the flows are loaded, which takes time; `--asked-at` is the time of the request to start.
        requests = session_options.requests_before(STOP.requests(settings), options.asked_at, time.time())
        streams = Topology.of_settings(settings).select([name for name in options.streams.split(",") if name])
        if options.print_versions:
            print(as_line(versions(settings, streams)), end="")
            return 0
        selection = session_options.select(options, settings, streams, requests)
        if not (selection.streams or options.standby):
            log.info("all streams of this session are stopped on purpose")
            return 0
        reasons, children = supervision(options, settings, streams, selection, began, in_process=arguments is None)
        settings, existing = existing_spark(settings)
        session = make(
            settings,
            selection.streams,
            **({} if existing is None else {"runtime": existing}),
            trigger=options.trigger,
            answers=selection.answers,
            reasons=reasons,
            children=children,
            left_out=selection.left_out if options.supervised else (),
            **({"standby": True} if options.standby else {}),
        )
        session.signalled_by = "" if options.supervised else "a signal to its process"
        stop = session.stop_all
        for number in child_sessions.STOP_SIGNALS:
            signal.signal(number, lambda *_: stop.set())
        child_sessions.take_signals(stop)
        if options.supervised:
            session_options.watch(stop)
        code = session.run()
        if session.superseded and arguments is None:
            child_sessions.start(stop)
    except RecourseError as error:
        log.error("session failed", code=error.code, found=error.found, next=error.next_step)
        if options.print_versions:
            print(as_line({ERROR: error.found}), end="")
        code = error.exit_code
    if session is not None and session.in_batch:  # its lease is free, and its thread gone, when this process is
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
