"""The checks of suites, executed by Dagster in this process with a runner of our own."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest

from orchestration.quality import spark_session, suites
from orchestration.quality.spark_session import CORES, HEAP_MB, QualitySpark, small
from orchestration.quality.suites import JOB, SuiteChecks, check_key, one_at_a_time, run_config, run_tags
from orchestration.sessions.ownership import WORKER_TAG
from orchestration.sessions.reporting import NO_RUN
from quality.suites import Suite
from quality.validation import Outcome, Validation
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.settings import Settings
from tests.support.validations import validation

ROWS, STOCK = Suite("orders_rows", "orders", list), Suite("stock_rows", "stock", list)
GOOD, BAD = Outcome("id", "unique", passed=True), Outcome("total", "between", passed=False, failing=2, rows=9)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


class Runs:
    """Suites with a runner of our own, and what it was asked for."""

    def __init__(self, home: Path, instance: dg.DagsterInstance, outcome: Callable[[Suite, Any], Validation]) -> None:
        self.asked: list[str] = []
        self.begun = 0
        self.outcome, self.instance = outcome, instance
        self.checks = SuiteChecks([ROWS, STOCK], Settings(home=home), self.run, self.begin)

    def run(self, suite: Suite, spark: Callable[[], Any], /) -> Validation:
        self.asked.append(suite.name)
        return self.outcome(suite, spark)

    def begin(self) -> None:
        self.begun += 1

    @property
    def defs(self) -> dg.Definitions:
        tables = dg.Definitions(assets=[dg.AssetSpec("orders"), dg.AssetSpec("stock")])
        return dg.Definitions.merge(tables, self.checks.definitions())

    def execute(self, *only: str) -> dg.ExecuteInProcessResult:
        """A run of the job."""
        job = self.defs.resolve_job_def(JOB)
        return job.execute_in_process(run_config(only), instance=self.instance, raise_on_error=False)

    def execute_from_page(self, suite: Suite) -> dg.ExecuteInProcessResult:
        """A run of a check."""
        job = self.defs.resolve_implicit_global_asset_job_def().get_subset(asset_check_selection={check_key(suite)})
        return job.execute_in_process(instance=self.instance)

    @property
    def outcomes(self) -> dict[str, dg.AssetCheckEvaluation]:
        """The newest outcome of each check, as Dagster shows it; a check that is planned has none."""
        known = self.instance.event_log_storage.get_latest_asset_check_execution_by_key(list(self.checks.by_key))
        assert {record.run_id for record in known.values()} == {NO_RUN}
        return {key.name: record.evaluation for key, record in known.items() if record.evaluation}

    @property
    def passed(self) -> dict[str, tuple[bool, str]]:
        return {name: (one.passed, one.severity.value) for name, one in self.outcomes.items()}


def test_a_run_evaluates_each_suite_as_a_check_of_its_table(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    runs = Runs(tmp_path, instance, lambda suite, _: validation(BAD if suite is ROWS else GOOD))
    done = runs.execute()
    assert done.success, "a failed check does not fail its run"
    assert runs.passed == {"orders_rows": (False, "ERROR"), "stock_rows": (True, "ERROR")}
    assert {each.asset_key.to_user_string() for each in runs.outcomes.values()} == {"orders", "stock"}
    assert runs.begun == 1
    assert run_tags(runs.checks.settings).items() <= done.dagster_run.tags.items()
    run = instance.get_run_by_id(done.run_id)
    assert run is not None
    assert f":{os.getpid()}:" in run.tags[WORKER_TAG]


def test_one_suite_can_be_run_alone(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    runs = Runs(tmp_path, instance, lambda *_: validation(GOOD))
    assert runs.execute("stock_rows").success
    assert (runs.asked, list(runs.passed)) == (["stock_rows"], ["stock_rows"])
    assert not runs.execute("stock_row").success, "no suite has that name"


def test_what_was_red_stays_red_while_it_is_evaluated_again(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    """Dagster shows a check that a run plans as being executed, whatever its last outcome was."""
    shown: list[dict[str, tuple[bool, str]]] = []

    def outcome(*_: object) -> Validation:
        if runs.asked == ["stock_rows"]:
            return validation(BAD)
        shown.append(runs.passed)
        return validation(GOOD)

    runs = Runs(tmp_path, instance, outcome)
    assert runs.execute("stock_rows").success
    assert runs.execute("stock_rows").success
    assert shown == [{"stock_rows": (False, "ERROR")}]
    assert runs.passed == {"stock_rows": (True, "ERROR")}


def test_an_exception_of_one_suite_is_red_and_the_others_are_evaluated(
    tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    def outcome(suite: Suite, _: Any) -> Validation:
        if suite is ROWS:
            raise RuntimeError("the table's log is damaged")
        return validation(GOOD)

    runs = Runs(tmp_path, instance, outcome)
    runs.execute()
    assert runs.passed == {"orders_rows": (False, "ERROR"), "stock_rows": (True, "ERROR")}
    assert "the table's log is damaged" in str(runs.outcomes["orders_rows"].description)


@pytest.mark.parametrize("from_page", [False, True])
def test_the_outcome_counts_for_the_table_also_after_its_next_materialisation(
    tmp_path: Path, instance: dg.DagsterInstance, from_page: bool
) -> None:
    instance.report_runless_asset_event(dg.AssetMaterialization("orders"))
    runs = Runs(tmp_path, instance, lambda *_: validation(BAD))
    done = runs.execute_from_page(ROWS) if from_page else runs.execute("orders_rows")
    instance.report_runless_asset_event(dg.AssetMaterialization("orders"))
    key = check_key(ROWS)
    (newest,) = instance.event_log_storage.get_asset_check_execution_history(key, limit=10)
    # Dagster compares the runs of check and materialisation; those of a stream belong to none.
    assert newest.run_id == NO_RUN
    assert newest.evaluation is not None
    assert not newest.evaluation.passed
    assert "failing: total" in newest.evaluation.metadata
    assert newest.evaluation.metadata["run"] == dg.MetadataValue.dagster_run(done.run_id)


class FakeRuntime:
    """Starts nothing."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.stopped = 0

    def start(self, name: str, inherited: Sequence[int] = ()) -> Any:
        self.started.append(name)
        return "session"

    def stop(self) -> None:
        self.stopped += 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_has_one_session_and_ends_it_however_it_ends(
    tmp_path: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    runtime = FakeRuntime()
    monkeypatch.setattr(spark_session, "LocalSpark", lambda _: runtime)

    def outcome(_: Suite, spark: Callable[[], Any]) -> Validation:
        assert spark() == "session"
        if fails:
            raise KeyboardInterrupt
        return validation(GOOD)

    assert Runs(tmp_path, instance, outcome).execute().success is not fails
    assert (runtime.started, runtime.stopped) == (["quality"], 1)


def test_without_a_suite_that_needs_spark_no_java_process_is_started(
    tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    seen: list[list[str]] = []

    def outcome(*_: object) -> Validation:
        seen.append([p.name() for p in psutil.Process().children(recursive=True) if "java" in p.name()])
        return validation(GOOD)

    assert Runs(tmp_path, instance, outcome).execute().success
    assert seen == [[], []]


def test_the_session_is_smaller_than_a_streams() -> None:
    settings = Settings.load({"spark.master": "local[*]", "spark.driver_memory_mb": 4096})
    resource = QualitySpark.of(settings)
    assert resource.spark_config["spark.driver.memory"] == f"{HEAP_MB}m"
    assert resource.spark_config["spark.master"] == CORES
    cluster = small(settings.model_copy(update={"spark": settings.spark.model_copy(update={"master": "yarn"})}))
    assert cluster.spark.master == "yarn"


def test_a_run_lets_the_streams_go_first() -> None:
    code = (
        "import os; from orchestration.quality.suites import lower_priority\n"
        "lower_priority(); lower_priority(); print(os.getpriority(os.PRIO_PROCESS, 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= suites.NICENESS


def test_a_check_executed_from_its_page_waits_for_the_run_that_evaluates_suites(tmp_path: Path) -> None:
    lock, told, entered = tmp_path / "home" / "quality.lock", threading.Event(), threading.Event()

    def second() -> None:
        with one_at_a_time(lock, lambda _: told.set()):
            entered.set()

    with one_at_a_time(lock, lambda _: None):
        thread = threading.Thread(target=second)
        thread.start()
        assert told.wait(10)
        assert not entered.is_set()
        with lock.open("a") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert entered.wait(10)
    thread.join()


@pytest.mark.parametrize(
    ("suite", "found"),
    [
        (Suite("x", "oders", list), "about table 'oders', and no stream writes it"),
        (Suite("health", "orders", list), "two checks named health"),
        (Suite("orders_rows", "orders", list, description="a second one"), "two checks named orders_rows"),
    ],
)
def test_a_suite_that_fits_no_table_or_has_the_name_of_another_check_is_refused(
    tmp_path: Path, suite: Suite, found: str
) -> None:
    checks = SuiteChecks([ROWS, suite], Settings(home=tmp_path), lambda *_: validation())
    with pytest.raises(ConfigurationError, match=found):
        checks.refuse_misfits(["orders", "stock"], taken=("health", "rules"))


def test_without_suites_there_is_nothing(tmp_path: Path) -> None:
    none = SuiteChecks([], Settings(home=tmp_path), lambda *_: validation())
    assert none.definitions() == dg.Definitions()
