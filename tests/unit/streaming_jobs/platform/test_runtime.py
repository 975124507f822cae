"""A runtime gives a session whose executors share the folders, and ends only what it has started.

Processes that sleep stand for JVMs, functions for executors.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streaming_jobs.errors import SetupError, TransientError
from streaming_jobs.platform import cluster
from streaming_jobs.platform.runtime import (
    ExistingSpark,
    LocalSpark,
    Runtime,
    existing_spark,
    spark_on_demand,
)
from streaming_jobs.settings import Settings
from streaming_jobs.testing import MemoryRuntime
from tests.conftest import SettingsFactory
from tests.support.launched import launched


@dataclass
class Launch:
    """Starts a process in the place of a JVM, or uses one that exists."""

    command: Sequence[str] = ("cat",)
    stopping: Callable[[], object] = lambda: None
    asked: dict[str, Any] = field(default_factory=dict)
    stops: int = 0
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __call__(self, settings: Settings, **asked: Any) -> Any:
        self.asked = asked
        if not self.command:
            return launched(None, self.stop)
        self.processes.append(subprocess.Popen(self.command, stdin=subprocess.PIPE, pass_fds=tuple(asked["keep_open"])))
        return launched(self.processes[-1], self.stop)

    def stop(self) -> None:
        self.stops += 1
        self.stopping()


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    made: list[Launch] = []
    yield made
    for process in (process for launch in made for process in launch.processes):
        process.kill()
        process.wait(10)


def started(settings: Settings, launch: Launch, launches: list[Launch]) -> LocalSpark:
    launches.append(launch)
    runtime = LocalSpark(settings, launch=launch)
    assert runtime.jvm is None and runtime.failure() is None and runtime.exit_code is None
    runtime.start("tests")
    return runtime


def test_a_jvm_that_was_started_or_begun_ends_with_its_session(
    settings: SettingsFactory, launches: list[Launch]
) -> None:
    launch = Launch()
    runtime = started(settings(), launch, launches)
    assert runtime.jvm == launch.processes[0].pid and runtime.failure() is None
    runtime.stop()
    assert (launch.stops, runtime.exit_code, runtime.jvm) == (1, 0, None)
    launches.append(Launch())
    runtime = LocalSpark(settings(), launch=launches[-1])
    runtime.begin("orders")
    runtime.start("orders")
    runtime.stop()
    assert (len(launches[-1].processes), launches[-1].stops, runtime.exit_code) == (1, 1, 0)


def test_a_jvm_is_started_with_what_it_inherits_and_with_its_name(settings: SettingsFactory, tmp_path: Path) -> None:
    launch, (left, right) = Launch(), os.pipe()
    runtime = LocalSpark(settings(), tmp_path / "classes", launch=launch)
    runtime.start("orders", [left])
    assert launch.asked == {"name": "orders", "keep_open": [left], "record_classes": tmp_path / "classes"}
    runtime.kill()
    os.close(left)
    os.close(right)


def test_a_session_that_does_not_stop_takes_its_jvm_along(settings: SettingsFactory, launches: list[Launch]) -> None:
    def gone() -> None:
        raise ConnectionError("the JVM does not answer")

    runtime = started(settings(), Launch(stopping=gone), launches)
    runtime.stop()
    assert runtime.exit_code == 0


def test_a_jvm_is_killed_without_waiting_for_its_session(settings: SettingsFactory, launches: list[Launch]) -> None:
    launch = Launch(["sleep", "60"])
    runtime = started(settings(), launch, launches)
    runtime.kill()
    assert (launch.stops, runtime.exit_code, runtime.jvm) == (0, -9, None)
    failure = runtime.failure()
    assert failure is not None and "killed by signal 9" in failure.found


@pytest.mark.parametrize("end", [LocalSpark.stop, LocalSpark.kill])
def test_a_jvm_that_was_begun_and_is_not_needed_is_killed(
    settings: SettingsFactory, launches: list[Launch], end: Callable[[LocalSpark], None]
) -> None:
    launches.append(Launch(["sleep", "60"]))
    runtime = LocalSpark(settings(), launch=launches[-1])
    runtime.begin("orders", [])
    assert runtime.jvm == launches[-1].processes[0].pid
    end(runtime)
    assert (launches[-1].stops, runtime.exit_code, runtime.jvm) == (0, -9, None)


def test_the_error_of_a_start_is_told_and_not_that_its_jvm_was_killed(settings: SettingsFactory) -> None:
    def refused() -> None:
        raise ValueError("Could not parse Master URL: 'sprak'")

    launch = Launch(["sleep", "60"])

    def launching(*arguments: Any, **asked: Any) -> Any:
        made = launch(*arguments, **asked)

        def session() -> None:
            made.kill()
            refused()

        made.session = session
        return made

    runtime = LocalSpark(settings(), launch=launching)
    with pytest.raises(ValueError, match="sprak"):
        runtime.start("orders")
    assert launch.processes[0].returncode == -9
    assert runtime.failure() is None and runtime.jvm is None
    runtime.stop()


def test_a_jvm_that_was_there_first_is_left(settings: SettingsFactory, launches: list[Launch]) -> None:
    """As under spark-submit: the session in it is ours, the process is not."""
    for end in (LocalSpark.stop, LocalSpark.kill):
        launch = Launch(())
        runtime = started(settings(), launch, launches)
        end(runtime)
        assert (launch.stops, runtime.jvm, runtime.exit_code, runtime.failure()) == (1, None, None, None)


def test_where_no_spark_is_there_none_can_be_used(settings: SettingsFactory) -> None:
    runtime = ExistingSpark(settings())
    with pytest.raises(SetupError, match="no Spark session is active"):
        runtime.start("tests")
    runtime.stop()
    assert runtime.jvm is None and runtime.failure() is None


@dataclass
class There:
    """A Spark that exists, in process 17; also the session beside it."""

    stopped: Callable[[], bool] = lambda: False
    queries: list[SimpleNamespace] = field(default_factory=list)
    sparkContext: Any = field(default_factory=lambda: SimpleNamespace(master="local[2]"))

    def __post_init__(self) -> None:
        handle = SimpleNamespace(current=lambda: SimpleNamespace(pid=lambda: 17))
        self._jvm = SimpleNamespace(java=SimpleNamespace(lang=SimpleNamespace(ProcessHandle=handle)))
        self._jsc = SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=self.stopped))
        self.properties: dict[str, str] = {}
        self.conf = SimpleNamespace(isModifiable=lambda _: False, set=self.properties.__setitem__)
        self.streams = SimpleNamespace(active=self.queries)

    def newSession(self) -> There:
        return self

    def range(self, *_: int) -> None:
        raise ConnectionError("executors are asked")


class NoCluster(SimpleNamespace):
    """What a cluster's context is asked for before its executors are."""

    def addPyFile(self, _: str) -> None:
        """Executors get it once they are there."""


@pytest.mark.parametrize("kind", ["started", "existing"])
def test_executors_of_other_machines_are_asked_before_the_session_is_used(
    settings: SettingsFactory, launches: list[Launch], kind: str
) -> None:
    master = "spark://there:7077"
    registered = SimpleNamespace(getExecutorMemoryStatus=lambda: SimpleNamespace(size=lambda: 3))
    context = NoCluster(master=master, defaultParallelism=2, _jsc=SimpleNamespace(sc=lambda: registered))
    there: Any = There(sparkContext=context)
    launch = Launch()
    launches.append(launch)

    def launching(*arguments: Any, **asked: Any) -> Any:
        return SimpleNamespace(**{**vars(launch(*arguments, **asked)), "session": lambda: there})

    runtime: Runtime = ExistingSpark(settings(), there)
    if kind == "started":
        runtime = LocalSpark(settings({"spark.master": master}), launch=launching)
    with pytest.raises(ConnectionError, match="executors are asked"):
        runtime.start("tests")


@pytest.mark.parametrize(
    ("wanted", "partitions"),
    [
        ({}, "6"),
        ({"spark.shuffle_partitions": 4}, None),
        ({"spark.extra": {"spark.sql.shuffle.partitions": "5"}}, None),
    ],
)
def test_a_shuffle_has_as_many_partitions_as_the_executors_have_cores(
    settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any], partitions: str | None
) -> None:
    for asked in ("send", "check"):
        monkeypatch.setattr(cluster, asked, lambda *_: None)
    monkeypatch.setattr(cluster, "settled_cores", lambda executors: executors.cores())
    registered = SimpleNamespace(getExecutorMemoryStatus=lambda: SimpleNamespace(size=lambda: 3))
    context = SimpleNamespace(
        master="spark://there:7077", defaultParallelism=6, _jsc=SimpleNamespace(sc=lambda: registered)
    )
    there: Any = There(sparkContext=context)
    ExistingSpark(settings(wanted), there).start("tests")
    assert there.properties.get("spark.sql.shuffle.partitions") == partitions


@pytest.mark.parametrize(
    ("end", "names", "jvm"),
    [
        (ExistingSpark.stop, ["first", "second"], None),
        (ExistingSpark.stop, ["stuck", "second", "third"], 17),
        (ExistingSpark.kill, ["first", "second"], 17),
        (ExistingSpark.kill, ["stuck", "second", "third"], 17),
    ],
)
def test_each_query_is_stopped_and_the_process_stays_named_while_a_query_may_be_at_work_in_it(
    settings: SettingsFactory, end: Callable[[ExistingSpark], None], names: list[str], jvm: int | None
) -> None:
    """Also after a query that does not end, and after a kill, which waits for no batch."""
    stops: list[str] = []

    def stop(name: str) -> Callable[[], None]:
        def stop() -> None:
            stops.append(name)
            if name == "stuck":
                raise RuntimeError("Stream Execution thread failed to stop within 5000 milliseconds")

        return stop

    there: Any = There(queries=[SimpleNamespace(stop=stop(name)) for name in names])
    runtime = ExistingSpark(settings(), there)
    runtime.start("tests")
    assert runtime.failure() is None
    end(runtime)
    assert (stops, runtime.jvm) == (names, jvm)


@pytest.mark.parametrize("alive", [True, False])
def test_a_spark_that_is_stopped_from_outside_or_does_not_answer_has_failed(
    settings: SettingsFactory, alive: bool
) -> None:
    def is_stopped() -> bool:
        if alive:
            return True
        raise ConnectionError("refused")

    there: Any = There(is_stopped)
    runtime = ExistingSpark(settings(), there)
    runtime.start("tests")
    failure = runtime.failure()
    assert runtime.jvm == 17 and failure is not None
    assert ("stopped from outside" if alive else "does not answer: refused") in failure.found


def test_a_runtime_without_a_jvm_tells_how_it_was_ended() -> None:
    runtime = MemoryRuntime()
    seam: Runtime = runtime
    seam.start("orders")
    assert seam.jvm is None and seam.failure() is None
    runtime.failed = TransientError("the JVM is gone", "start again")
    assert seam.failure() is runtime.failed
    seam.kill()
    seam.stop()
    assert (runtime.names, runtime.ends) == (["orders"], ["kill", "stop"])


@pytest.fixture(params=["started", "existing", "memory"])
def runtime(request: pytest.FixtureRequest, settings: SettingsFactory, launches: list[Launch]) -> Runtime:
    """Each implementation of the contract, before its start."""
    if request.param == "memory":
        return MemoryRuntime()
    if request.param == "existing":
        there: Any = There()
        return ExistingSpark(settings(), there)
    launches.append(Launch())
    return LocalSpark(settings(), launch=launches[-1])


def test_a_runtime_names_no_process_before_its_start_and_after_an_orderly_end(runtime: Runtime) -> None:
    assert runtime.jvm is None and runtime.failure() is None
    runtime.begin("orders")
    assert runtime.start("orders") is not None
    if isinstance(runtime, MemoryRuntime):
        runtime.jvm = os.getpid()
    assert runtime.jvm is not None and runtime.failure() is None
    runtime.stop()
    assert runtime.jvm is None


@pytest.mark.parametrize("fails", [False, True])
def test_spark_on_demand_starts_once_and_ends_with_the_block_after_an_exception_at_once(
    settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    runtime = MemoryRuntime()
    monkeypatch.setattr("streaming_jobs.platform.runtime.LocalSpark", lambda _: runtime)
    with suppress(KeyboardInterrupt), spark_on_demand(settings(), "quality") as spark:
        assert runtime.names == []
        assert spark() is spark()
        if fails:
            raise KeyboardInterrupt
    assert (runtime.names, runtime.ends) == (["quality"], ["kill" if fails else "stop"])


def test_spark_on_demand_starts_another_jvm_after_one_that_could_not_start(
    settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtimes: list[MemoryRuntime] = []

    class Failing(MemoryRuntime):
        def start(self, name: str, inherited: Sequence[int] = ()) -> Any:
            raise TransientError("the JVM ended while it started", "try again")

    def make(_: Settings) -> MemoryRuntime:
        runtimes.append(MemoryRuntime() if len(runtimes) == 1 else Failing())
        return runtimes[-1]

    monkeypatch.setattr("streaming_jobs.platform.runtime.LocalSpark", make)
    with spark_on_demand(settings(), "quality") as spark:
        with pytest.raises(TransientError):
            spark()
        assert runtimes[0].ends == ["kill"] and spark() is spark()
    assert (len(runtimes), runtimes[1].ends) == (2, ["stop"])


def test_a_driver_without_a_session_in_its_process_starts_its_own(
    settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, there = settings(), There(sparkContext=SimpleNamespace(master="spark://there:7077"))
    session = SimpleNamespace(getActiveSession=lambda: None, builder=SimpleNamespace(getOrCreate=lambda: there))
    monkeypatch.setitem(sys.modules, "pyspark.sql", SimpleNamespace(SparkSession=session))
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION", raising=False)
    assert existing_spark(made) == (made, None)
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "18.0")
    found, runtime = existing_spark(made)
    assert runtime is not None and runtime.session is there and found.spark.has_executors
