"""The driver: one process that runs one or more streams in one Spark session.

    python -m streaming_jobs.session --streams flights_clean,carrier_totals

Order of a start: leases, then preflight of every stream (no JVM yet, so a refusal is told within a second), then
the JVM, which inherits the leases, then the queries. One stream's failure leaves the others running. The session ends
when all its streams have ended: by SIGTERM or SIGINT, by the file `<state>/<stream>/stop`, by the end of standard
input under `--supervised` (the parent is gone), or because the trigger was available-now.

Under `--supervised`, a stream whose recovery is over starts again in the running session if the session's code and
settings are those on disk. Otherwise the session starts itself again (`runtime/restart_in_place.py`), because corrected
code needs a new process; it does the same when the code of a stream that failed for good has changed. Whoever started
the session sees the same process go on.

Exit codes: 0 all stopped or finished; 1 a failure that may pass; 2 wrong usage; 75 a lease is busy; 78 every stream
that failed needs a person.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from streaming_jobs import collisions
from streaming_jobs.errors import LeaseBusy, PermanentError, RecourseError, TransientError
from streaming_jobs.failures import classify
from streaming_jobs.platform.broker import bootstrap_servers
from streaming_jobs.platform.class_data import RECORD_SECONDS
from streaming_jobs.platform.exit_status import jvm_gone
from streaming_jobs.runtime import restart_in_place, session_options
from streaming_jobs.runtime.batch_hooks import Replan
from streaming_jobs.runtime.code_watch import CodeWatch, as_line, versions
from streaming_jobs.runtime.lag import EndOffsets
from streaming_jobs.runtime.query_builder import Connection
from streaming_jobs.runtime.stream_runner import LINGERING, StreamRunner
from streaming_jobs.settings import CONFIG_FILE, Settings, load
from streaming_jobs.sources.connection import client_config, spark_options
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state import stop_request
from streaming_jobs.state.first_status import first_status
from streaming_jobs.state.lease import Lease, acquire, holder
from streaming_jobs.state.status import Status, write_status
from streaming_jobs.stream import Stream
from streaming_jobs.topology import Topology

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = structlog.get_logger()

_LEASE_WAIT = 10.0
_LOOK_EVERY = 0.1
_STATUS_EVERY = 1.0
_QUICK = timedelta(seconds=2)
_JVM_NOTICED = 2.0
_JVM_END = 60.0


class Session:
    """The streams of this process, from leases to the end of the last one."""

    def __init__(
        self,
        settings: Settings,
        streams: Sequence[Stream],
        *,
        trigger: str | None = None,
        answers: Mapping[str, stop_request.Request] | None = None,
        left_out: Iterable[str] = (),
        record_classes: Path | None = None,
        supervised: bool = False,
        watch: CodeWatch | None = None,
        replan: Replan | None = None,
    ) -> None:
        """`record_classes` is a file for the class-data archive that the JVM writes when it ends.

        `answers` are the stop requests, by stream, that this start was made to end. `left_out` are streams of this
        session that a recovery has stopped.
        One that is `supervised` may end to be started again in its place, with the code of then (`superseded`): after
        a recovery of one of its streams, or when `watch` says that other code is there for one that has failed.
        """
        self.settings = settings
        self.record_classes = record_classes
        self.streams = list(streams)
        self.trigger = trigger
        self.answers = dict(answers or {})
        self.stop_all = threading.Event()
        self.running: list[StreamRunner] = []
        self.spark: SparkSession | None = None
        self.jvm: subprocess.Popen[bytes] | None = None
        self.supervised = supervised
        self.watch = watch
        self.replan = replan
        self.superseded = False
        self._recovering = set(left_out)
        self._status_unwritten = False
        self._ends: EndOffsets | None = None

    def run(self) -> int:
        """Run to the end and return the exit code. Raises LeaseBusy before anything is touched."""
        leases = self._take_leases()
        with ExitStack() as at_end:  # in reverse order, and each one whatever became of the others
            for lease in leases:
                at_end.callback(self._let_go, lease)
            at_end.callback(self._end_spark)
            if self.watch is not None:
                at_end.callback(self.watch.close)
            at_end.callback(self._end_looking)
            at_end.callback(self._write_statuses)
            try:
                self._prepare(leases)
                if any(not r.ended for r in self.running):
                    with self._beating():
                        self._start_spark(leases)
                    self._loop()
            except BaseException as error:
                told = jvm_gone(self.jvm, _JVM_NOTICED) or classify(error)
                for running in self.running:
                    if not running.ended:
                        running.abandon(told)
                if isinstance(error, Exception) and told is not error:
                    raise told from error
                raise
            return self._exit_code()

    @property
    def in_batch(self) -> bool:
        """True if a batch is still at work in this process, which may commit until the process has ended."""
        return any(running.in_batch for running in self.running)

    def _take_leases(self) -> list[Lease]:
        leases: list[Lease] = []
        try:
            for stream in self.streams:
                leases += [acquire(self.settings, stream.name, purpose="session", wait=_LEASE_WAIT)]
        except BaseException:
            for lease in leases:
                lease.release()
            raise
        return leases

    def _prepare(self, leases: Sequence[Lease]) -> None:
        for stream, lease in zip(self.streams, leases, strict=True):
            status = first_status(self.settings, stream.name)
            self._write_status(status)
            running = StreamRunner(stream, self.settings, None, lease, self.trigger, status, replan=self.replan)
            self.running.append(running)
        bootstrap = bootstrap_servers(self.settings)
        kafka = self.settings.kafka
        connection = Connection(
            spark_options=spark_options(kafka, bootstrap),
            topics=Topics.of(kafka, bootstrap),
            quick=Topics(client_config(kafka, bootstrap), _QUICK),
        )
        self._ends = EndOffsets(connection.quick, [t.name for s in self.streams for t in s.sources.values()]).start()
        for running in self.running:
            running.connection, running.ends = connection, self._ends
            try:
                running.preflight()
            except Exception as error:  # noqa: BLE001 - one stream's trouble leaves the others running
                running.fail(classify(error))
            self._answer(running)

    def _answer(self, running: StreamRunner) -> None:
        """End the stop that this start was made to end, if preflight lets the stream try; obey any other one."""
        name, request = running.stream.name, self.answers.get(running.stream.name)
        if running.ended:
            return
        if request is not None and request.plan is None:
            stop_request.clear(self.settings, name, request)
        if (newer := stop_request.request(self.settings, name)) is not None:
            log.warning("the stream is not started: a stop was asked for", stream=name, by=newer.who)
            running.leave_stopped()

    def _start_spark(self, leases: Sequence[Lease]) -> None:
        from streaming_jobs.platform import spark as platform

        self.spark = platform.start(
            self.settings,
            name="-".join(s.name for s in self.streams)[:80],
            keep_open=[lease.descriptor for lease in leases],
            record_classes=self.record_classes,
        )
        self.jvm = platform.jvm(self.spark)
        for lease in leases:
            if self.jvm is not None:
                lease.record_jvm(self.jvm.pid)
        for running in self.running:
            if not running.ended and not self.stop_all.is_set():
                running.start(self.spark)

    def _loop(self) -> None:
        assert self.spark is not None
        written = 0.0
        while any(not running.ended and not running.gave_up for running in self.running):
            if (gone := jvm_gone(self.jvm, 0)) is not None:
                raise gone
            self._look_at_recoveries()
            self._look_at_code()
            for running in self.running:
                if self.stop_all.is_set() or self.superseded or stop_request.asked(self.settings, running.stream.name):
                    running.request_stop()
                running.poll(self.spark)
                if running.stuck:
                    raise TransientError(
                        f"a batch of stream {running.stream.name} did not end within {LINGERING:.0f} s after it was "
                        "interrupted: the session ends with its JVM, and the next one repeats the batch",
                        "its log says what the batch waits for",
                    )
            over = [running for running in self.running if running.ended and not running.left]
            if len(over) < len([running for running in self.running if not running.left]):
                for running in over:
                    self._leave(running)
            if time.monotonic() - written >= _STATUS_EVERY:
                self._write_statuses()
                written = time.monotonic()
            time.sleep(_LOOK_EVERY)
        for running in self.running:
            if not running.ended:
                running.give_up()

    def _let_go(self, lease: Lease) -> None:
        """Release a lease, except one whose batch is at work yet: the end of this process releases that one."""
        if not any(running.lease is lease and running.in_batch for running in self.running):
            lease.release()

    def _leave(self, running: StreamRunner) -> None:
        """One stream is over and others go on: once that is written it is free for a recovery, or another session."""
        if self._write_status(running.status):
            running.left = True
            running.lease.unlock()

    def _look_at_recoveries(self) -> None:
        """Start a stream again whose recovery is over; with other code on disk, make way for a session that has it."""
        if not self.supervised or self.superseded:
            return
        ours = {running.stream.name for running in self.running if not running.left}
        for name in sorted(self._recovering.union(running.stream.name for running in self.running)):
            if stop_request.for_recovery(self.settings, name):
                self._recovering.add(name)
            elif name not in self._recovering or self.stop_all.is_set():
                continue
            elif stop_request.asked(self.settings, name):  # somebody wants it to stay stopped
                self._recovering.discard(name)
            elif name not in ours and holder(self.settings, name) is not None:
                continue
            elif self.watch is not None and self.watch.untouched() and (back := self._left(name)) is not None:
                try:
                    if self._take_back(back):
                        self._recovering.discard(name)
                except (LeaseBusy, OSError) as error:  # a new session looks at it from the beginning
                    log.warning("the stream could not be started again in place", stream=name, reason=str(error))
                    self.superseded = True
            else:
                log.info("a recovery is over: the session starts again with the code of now", stream=name)
                self.superseded = True

    def _left(self, name: str) -> StreamRunner | None:
        return next((running for running in self.running if running.left and running.stream.name == name), None)

    def _take_back(self, left: StreamRunner) -> bool:
        """Start a stream again that this session had left; False if somebody else came first."""
        assert self.spark is not None
        if not left.lease.lock_again():
            return False
        if self.jvm is not None:
            left.lease.record_jvm(self.jvm.pid)
        log.info("a recovery is over: the stream starts again", stream=left.stream.name)
        running = StreamRunner(
            left.stream,
            self.settings,
            left.connection,
            left.lease,
            self.trigger,
            first_status(self.settings, left.stream.name),
            ends=self._ends,
            replan=self.replan,
        )
        self.running[self.running.index(left)] = running
        self._write_status(running.status)
        running.start(self.spark)
        return True

    def _look_at_code(self) -> None:
        """Make way when there is other code for a stream that was given up, and nobody else runs it."""
        failed = [
            running.stream.name
            for running in self.running
            if (running.status.state == "failed" or running.gave_up)
            and not stop_request.asked(self.settings, running.stream.name)
        ]
        if self.watch is None or not failed or self.superseded or not self.watch.newer(failed):
            return
        elsewhere = [r.stream.name for r in self.running if r.left and holder(self.settings, r.stream.name) is not None]
        if not set(failed).intersection(elsewhere):
            log.info("failed streams have other code or settings: the session starts again", streams=",".join(failed))
            self.superseded = True

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Keep the status files fresh while this thread waits for the JVM and for the first plans."""
        ready = threading.Event()

        def beat() -> None:
            while not ready.wait(_STATUS_EVERY):
                for running in self.running:
                    running.beat()
                    self._write_status(running.status)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ready.set()
            thread.join()

    def _write_statuses(self) -> None:
        for running in self.running:
            if not running.left:
                running.refresh_status()
                self._write_status(running.status)

    def _write_status(self, status: Status) -> bool:
        """True if it was written: if not (the disk is full), it stops nothing and is told once until it works again."""
        try:
            write_status(self.settings, status)
            self._status_unwritten = False
        except OSError as error:
            if not self._status_unwritten:
                log.warning("the status could not be written", stream=status.stream, reason=str(error))
            self._status_unwritten = True
        return not self._status_unwritten

    def _end_looking(self) -> None:
        if self._ends is not None:
            self._ends.close()

    def _exit_code(self) -> int:
        if self.superseded:  # what failed before the recovery is for the next session to find out
            return 0
        failed = [r.status.error for r in self.running if r.status.state == "failed" and r.status.error]
        if not failed:
            return 0
        return PermanentError.exit_code if all(error["permanent"] for error in failed) else 1

    def _end_spark(self) -> None:
        if self.spark is None:
            return
        from streaming_jobs.platform import spark as platform

        writes_classes = self.record_classes is not None
        platform.end(self.spark, self.jvm, RECORD_SECONDS if writes_classes else _JVM_END, at_once=self.in_batch)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the driver process."""
    _log_to_stderr()
    options = session_options.parse(arguments)
    session: Session | None = None
    try:
        collisions.check()
        settings = load(session_options.flags(options), config_file=options.config).settings
        # Before the flows are loaded, which takes its time; whoever started this process may know when it was asked to.
        answers = stop_request.requests(settings)
        if options.asked_at is not None:
            now = time.time()  # a time that lies ahead is one of before the clock was set back
            answers = {n: request for n, request in answers.items() if not options.asked_at < request.since <= now}
        names = [name for name in options.streams.split(",") if name]
        streams = Topology.of_settings(settings).select(names)
        if options.print_versions:
            print(as_line(versions(settings, streams)), end="")
            return 0
        left_out: list[str] = []
        if options.respect_stop or options.again:
            left_out = [s.name for s in streams if stop_request.for_recovery(settings, s.name)]
            streams = [s for s in streams if s.name not in left_out and not stop_request.asked(settings, s.name)]
            answers = {}
            if not streams:
                log.info("all streams of this session are stopped on purpose")
                return 0
        if options.again:
            streams = restart_in_place.free(settings, streams)
        watch = None
        if options.supervised and arguments is None:
            config = options.config or Path(os.environ.get("RECOURSE_CONFIG", CONFIG_FILE))
            watch = CodeWatch([*sys.orig_argv, "--print-versions"], settings, streams, config)
        session = Session(
            settings,
            streams,
            trigger=options.trigger,
            answers=answers,
            left_out=left_out,
            supervised=options.supervised,
            watch=watch,
        )
        stop = session.stop_all
        for number in restart_in_place.STOP_SIGNALS:
            signal.signal(number, lambda *_: stop.set())
        restart_in_place.take_signals(stop)
        if options.supervised:
            threading.Thread(target=_watch_stdin, args=(stop,), daemon=True).start()
        code = session.run()
        if session.superseded and arguments is None:
            restart_in_place.start(stop)
        return code
    except RecourseError as error:
        log.error("session failed", code=error.code, found=error.found, next=error.next_step)
        if session is not None and session.in_batch:  # its lease is free, and its thread gone, when this process is
            sys.stderr.flush()
            os._exit(error.exit_code)
        return error.exit_code


def _watch_stdin(stop: threading.Event) -> None:
    # os.read, not sys.stdin: a thread inside the buffered reader aborts the interpreter at exit.
    while os.read(0, 4096):
        pass
    log.info("standard input ended: the parent is gone")
    stop.set()


def _log_to_stderr() -> None:
    logging.getLogger("py4j").setLevel(logging.ERROR)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], drop_missing=True)
            if not sys.stderr.isatty()
            else structlog.dev.ConsoleRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


if __name__ == "__main__":
    sys.exit(main())
