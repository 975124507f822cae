"""The Spark of a session: started for it, or existing already. A runtime ends only what it has started.

    LocalSpark      starts a JVM and a session in it, and ends both; under spark-submit the JVM exists, and stays
    ExistingSpark   makes a session beside an existing one, with the SQL properties of `spark.py`; ends its queries

`MemoryRuntime` in `streaming_jobs.testing` has no JVM.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from streaming_jobs.errors import SetupError, TransientError
from streaming_jobs.platform import cluster, spark
from streaming_jobs.platform.class_data import RECORD_SECONDS
from streaming_jobs.platform.cluster import ExecutorWatch
from streaming_jobs.platform.processes.child import jvm_gone
from streaming_jobs.platform.spark import Launched
from streaming_jobs.settings import Settings
from streaming_jobs.settings_sections import in_this_process
from streaming_jobs.storage.files import scratch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


log = structlog.get_logger()

JVM_END = 60.0
"""Seconds that a JVM has to end in order, before it is killed."""


class Runtime(Protocol):
    """One Spark session for one driver: `begin`, `start`, then `stop` or `kill`, each once; `begin` may be left out."""

    @property
    def jvm(self) -> int | None:
        """The pid of the process in which queries may run; None before the start and after an orderly end."""

    def begin(self, name: str, inherited: Sequence[int] = ()) -> None:
        """Begin what takes long of a start, and do not wait for it; `start` has the same arguments then.

        Raises SetupError if there is no Spark to use.
        """

    def start(self, name: str, inherited: Sequence[int] = ()) -> SparkSession:
        """Return the session. A JVM that is started for it inherits the descriptors (the leases).

        Raises SetupError if there is no Spark to use, PermanentError if executors on other machines do not share the
        folders of tables and state with the driver.
        """

    def failure(self, patience: float = 0.0) -> TransientError | None:
        """The error that says how the session ended, if it has ended or does so within `patience` seconds."""

    def stop(self) -> None:
        """End what was started, in order."""

    def kill(self) -> None:
        """End what was started without waiting for a running batch."""


@dataclass
class LocalSpark:
    """Spark on this machine, in a JVM that ends with the session.

    `record_classes` is a file for the class-data archive that the JVM writes when it ends.
    """

    settings: Settings
    record_classes: Path | None = None
    launch: Callable[..., Launched] = spark.launch
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    """The JVM, once it was started; None if it existed before (spark-submit)."""
    _launched: Launched | None = field(default=None, init=False)
    _session: SparkSession | None = field(default=None, init=False)
    _watch: ExecutorWatch | None = field(default=None, init=False)

    @property
    def jvm(self) -> int | None:
        """The pid of the JVM, while it runs."""
        return self.process.pid if self.process is not None and self.process.returncode is None else None

    @property
    def exit_code(self) -> int | None:
        """The JVM's exit code, negative for a signal; None while it runs."""
        return self.process.returncode if self.process is not None else None

    def begin(self, name: str, inherited: Sequence[int] = ()) -> None:
        self._launched = self.launch(self.settings, name=name, keep_open=inherited, record_classes=self.record_classes)
        self.process = self._launched.process

    def start(self, name: str, inherited: Sequence[int] = ()) -> SparkSession:
        """Start the JVM, if `begin` has not, and the session in it."""
        if self._launched is None:
            self.begin(name, inherited)
        assert self._launched is not None
        try:
            self._session = self._launched.session()
        except BaseException:
            self.process = None  # the start has failed and has ended it: the error tells why, its exit code would not
            raise
        self._watch = _with_executors(self.settings, self._session, spark.profile(self.settings)["spark.master"])
        return self._session

    @property
    def session(self) -> SparkSession | None:
        """The session, once it was started."""
        return self._session

    def failure(self, patience: float = 0.0) -> TransientError | None:
        gone = jvm_gone(self.process, patience)
        return self._watch.failure() if gone is None and self._watch is not None else gone

    def stop(self) -> None:
        """Stop the session, then its JVM; kill the JVM if it does not end in time."""
        if self._session is not None:
            try:
                self._session.stop()
            except Exception as error:  # noqa: BLE001 - the JVM may be gone already, which is what is wanted here
                log.info("the Spark session did not stop", reason=str(error)[:200])
            if self.process is not None:
                self._end(self.process)
        if self._launched is not None:
            self._launched.kill()

    def kill(self) -> None:
        """Kill the JVM: an orderly stop would wait for the batch. A JVM that existed before is left running."""
        if self.process is not None and self._launched is not None:
            self._launched.kill()
        else:
            self.stop()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Let the JVM end, for which it has some time."""
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(JVM_END if self.record_classes is None else RECORD_SECONDS)


@contextmanager
def spark_on_demand(settings: Settings, name: str, *, kill: bool = False) -> Iterator[Callable[[], SparkSession]]:
    """Gives a function that returns the session, and starts it when it is first called; after a failed start, anew.

    The block ends it; after an exception, or with `kill`, without waiting for a running query.
    """
    runtime, sessions = LocalSpark(settings), list[Any]()

    def session() -> SparkSession:
        nonlocal runtime
        if not sessions:
            try:
                sessions.append(runtime.start(name))
            except BaseException:
                runtime.kill()
                runtime = LocalSpark(settings)
                raise
        started: SparkSession = sessions[0]
        return started

    try:
        yield session
    except BaseException:
        runtime.kill()
        raise
    if kill:
        runtime.kill()
    else:
        runtime.stop()


@dataclass
class ExistingSpark:
    """Spark that exists already: that of the given session, or of the active one. It runs on afterwards."""

    settings: Settings
    session: SparkSession | None = None
    jvm: int | None = field(default=None, init=False)
    """The pid of its process, from `start` to an orderly end: if this driver dies, the next one waits for it."""
    _ours: SparkSession | None = field(default=None, init=False)
    _watch: ExecutorWatch | None = field(default=None, init=False)

    def begin(self, name: str, inherited: Sequence[int] = ()) -> None:
        """Nothing: it runs already."""

    def start(self, name: str, inherited: Sequence[int] = ()) -> SparkSession:  # noqa: ARG002 - it runs already
        """Make a session beside the existing one; its properties and queries are its own."""
        from pyspark.sql import SparkSession

        there = self.session or SparkSession.getActiveSession()
        if there is None:
            raise SetupError("no Spark session is active", "make one first, or let the session start its own Spark")
        self._ours = there.newSession()
        for key, value in spark.profile(self.settings).items():
            if self._ours.conf.isModifiable(key):
                self._ours.conf.set(key, value)
        java = self._ours._jvm
        assert java is not None
        self.jvm = int(java.java.lang.ProcessHandle.current().pid())
        self._watch = _with_executors(self.settings, self._ours, str(self._ours.sparkContext.master))
        return self._ours

    def failure(self, patience: float = 0.0) -> TransientError | None:  # noqa: ARG002 - it answers, or it does not
        """The error for a Spark that was stopped, or that does not answer."""
        if self._ours is None:
            return None
        try:
            if not self._ours._jsc.sc().isStopped():
                return self._watch.failure() if self._watch is not None else None
        except Exception as error:  # noqa: BLE001 - a Spark that cannot be reached runs nothing
            gone = TransientError(f"Spark does not answer: {str(error)[:200]}", "the next session repeats its batches")
            gone.__cause__ = error
            return gone
        return TransientError("Spark was stopped from outside", "the next session repeats its batches")

    def stop(self) -> None:
        """Stop the queries of this session that still run; `jvm` stays as it is if one of them does not end."""
        if self._stop_queries():
            self.jvm = None

    def kill(self) -> None:
        """Stop the queries, since no lease covers them from now on; each may take Spark's `stopTimeout`.

        `jvm` stays as it is: a batch that was interrupted may run on to the end of its commit.
        """
        self._stop_queries()

    def _stop_queries(self) -> bool:
        """Stop each query, even if one of them does not end; True if all of them have ended."""
        if self._ours is None:
            return True
        try:
            queries = self._ours.streams.active
        except Exception as error:  # noqa: BLE001 - Spark is gone, or does not answer
            log.warning("the queries of this session could not be listed", reason=str(error)[:200])
            return False
        stopped = True
        for query in queries:
            try:
                query.stop()
            except Exception as error:  # noqa: BLE001 - its thread still runs, or Spark is gone
                log.warning("a query of this session did not stop", reason=str(error)[:200])
                stopped = False
        return stopped


def existing_spark(settings: Settings) -> tuple[Settings, ExistingSpark | None]:
    """The active session of this process, if there is one, and the settings with that session's master.

    A session is there in a notebook, on Databricks, and in a program that calls the driver after it has made one.
    """
    there = _active()
    if there is None:
        return settings, None
    master = str(there.sparkContext.master)
    spark_settings = settings.spark.model_copy(update={"master": master})
    log.info("the Spark session of this process is used", master=master)
    settings = settings.model_copy(update={"spark": spark_settings})
    return settings, ExistingSpark(settings, there)


def _active() -> SparkSession | None:
    """Without an import of PySpark, which takes long: who has a session in this process has imported it."""
    if "DATABRICKS_RUNTIME_VERSION" in os.environ:
        from pyspark.sql import SparkSession

        return SparkSession.builder.getOrCreate()  # the cluster's
    module = sys.modules.get("pyspark.sql")
    return module.SparkSession.getActiveSession() if module is not None else None


def _with_executors(settings: Settings, session: SparkSession, master: str) -> ExecutorWatch | None:
    """Send executors on other machines what they need, check and watch them; None if there are no such executors."""
    if in_this_process(master):
        return None
    executors = cluster.SparkExecutors(session)
    cluster.send(session, settings, scratch(settings.home, "spark").folder)
    cluster.check(settings, executors)
    if not settings.spark.shuffle_partitions and spark.PARTITIONS not in settings.spark.extra:
        session.conf.set(spark.PARTITIONS, str(cluster.settled_cores(executors)))
    return cluster.ExecutorWatch(settings, executors)
