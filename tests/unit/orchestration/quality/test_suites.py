"""The checks of suites, executed by Dagster in this process with a runner of our own."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import dagster as dg
import psutil
import pytest
import yaml
from dagster._core.remote_origin import RemoteJobOrigin

from orchestration.quality import spark_session
from orchestration.quality.spark_session import CORES, HEAP_MB, QualitySpark, small
from orchestration.quality.suites import (
    JOB,
    MOST_TABLES,
    OP,
    SuiteChecks,
    cron_of_interval,
    due_checks,
    of_exception,
    of_validation,
    one_at_a_time,
    run_config,
    run_tags,
    table,
)
from orchestration.recoveries.launchpad import JOB as RECOVER
from orchestration.recoveries.launchpad import STEP, Launchpad, launch_of, schema
from orchestration.sessions.ownership import QUALITY_KIND, WORKER_TAG, job_tags
from orchestration.sessions.reporting import NO_RUN
from quality.suites import Suite
from quality.validation import MOST_ROWS, CheckOutcome, FirstFailing, Severity, Validation
from streaming_jobs.errors import ConfigurationError, UsageError
from streaming_jobs.platform.processes.child import NICENESS
from streaming_jobs.settings import Settings
from streaming_jobs.testing import MemoryRuntime
from tests.support.dagster_homes import REPOSITORY, planned
from tests.support.validations import validation

pytestmark = pytest.mark.slow

ROWS, STOCK = Suite("orders_rows", "orders", list), Suite("stock_rows", "stock", list)
GOOD, BAD = CheckOutcome("id", "unique", passed=True), CheckOutcome("total", "between", passed=False, failing=2, rows=9)


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
        return job.execute_in_process(
            run_config(self.checks.settings, only), instance=self.instance, raise_on_error=False
        )

    def execute_from_page(self, suite: Suite) -> dg.ExecuteInProcessResult:
        """A run of a check."""
        job = self.defs.resolve_implicit_global_asset_job_def().get_subset(
            asset_check_selection={self.checks.key(suite)}
        )
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


Make = Callable[[Callable[[Suite, Any], Validation]], Runs]


@pytest.fixture
def runs_of(tmp_path: Path, instance: dg.DagsterInstance) -> Make:
    return partial(Runs, tmp_path, instance)


def test_a_run_evaluates_each_suite_as_a_check_of_its_table(runs_of: Make) -> None:
    runs = runs_of(lambda suite, _: validation(BAD if suite is ROWS else GOOD))
    done = runs.execute()
    assert done.success, "a failed check does not fail its run"
    assert runs.passed == {"orders_rows": (False, "ERROR"), "stock_rows": (True, "ERROR")}
    assert {each.asset_key.to_user_string() for each in runs.outcomes.values()} == {"orders", "stock"}
    assert runs.begun == 1
    assert run_tags(runs.checks.settings).items() <= done.dagster_run.tags.items()
    run = runs.instance.get_run_by_id(done.run_id)
    assert run is not None
    assert f":{os.getpid()}:" in run.tags[WORKER_TAG]


def test_one_suite_can_be_run_alone(runs_of: Make) -> None:
    runs = runs_of(lambda *_: validation(GOOD))
    assert runs.execute("stock_rows").success
    assert (runs.asked, list(runs.passed)) == (["stock_rows"], ["stock_rows"])
    assert not runs.execute("stock_row").success, "no suite has that name"


def test_what_was_red_stays_red_while_it_is_evaluated_again(runs_of: Make) -> None:
    """Dagster shows a check that a run plans as being executed, whatever its last outcome was."""
    shown: list[dict[str, tuple[bool, str]]] = []

    def outcome(*_: object) -> Validation:
        if runs.asked == ["stock_rows"]:
            return validation(BAD)
        shown.append(runs.passed)
        return validation(GOOD)

    runs = runs_of(outcome)
    assert runs.execute("stock_rows").success
    assert runs.execute("stock_rows").success
    assert shown == [{"stock_rows": (False, "ERROR")}]
    assert runs.passed == {"stock_rows": (True, "ERROR")}


def test_an_exception_of_one_suite_is_red_and_the_others_are_evaluated(runs_of: Make) -> None:
    def outcome(suite: Suite, _: Any) -> Validation:
        if suite is ROWS:
            raise RuntimeError("the table's log is damaged")
        return validation(GOOD)

    runs = runs_of(outcome)
    runs.execute()
    assert runs.passed == {"orders_rows": (False, "ERROR"), "stock_rows": (True, "ERROR")}
    assert "the table's log is damaged" in str(runs.outcomes["orders_rows"].description)


@pytest.mark.parametrize("from_page", [False, True])
def test_the_outcome_counts_for_the_table_also_after_its_next_materialisation(
    runs_of: Make, instance: dg.DagsterInstance, from_page: bool
) -> None:
    instance.report_runless_asset_event(dg.AssetMaterialization("orders"))
    runs = runs_of(lambda *_: validation(BAD))
    done = runs.execute_from_page(ROWS) if from_page else runs.execute("orders_rows")
    instance.report_runless_asset_event(dg.AssetMaterialization("orders"))
    key = runs.checks.key(ROWS)
    (newest,) = instance.event_log_storage.get_asset_check_execution_history(key, limit=10)
    # Dagster compares the runs of check and materialisation; those of a stream belong to none.
    assert newest.run_id == NO_RUN
    assert newest.evaluation is not None
    assert not newest.evaluation.passed
    assert "failing: total" in newest.evaluation.metadata
    assert newest.evaluation.metadata["run"] == dg.MetadataValue.dagster_run(done.run_id)


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_has_one_session_and_ends_it_however_it_ends(
    runs_of: Make, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    runtime, sessions = MemoryRuntime(), []
    monkeypatch.setattr(spark_session, "LocalSpark", lambda _: runtime)

    def outcome(_: Suite, spark: Callable[[], Any]) -> Validation:
        sessions.append(spark())
        if fails:
            raise KeyboardInterrupt
        return validation(GOOD)

    assert runs_of(outcome).execute().success is not fails
    assert all(session is sessions[0] for session in sessions)
    assert (runtime.names, runtime.ends) == (["quality"], ["stop"])


def test_without_a_suite_that_needs_spark_no_java_process_is_started(runs_of: Make) -> None:
    seen: list[list[str]] = []

    def outcome(*_: object) -> Validation:
        seen.append([p.name() for p in psutil.Process().children(recursive=True) if "java" in p.name()])
        return validation(GOOD)

    assert runs_of(outcome).execute().success
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
        "import os; from streaming_jobs.platform.processes.child import lower_priority\n"
        "lower_priority(); lower_priority(); print(os.getpriority(os.PRIO_PROCESS, 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= NICENESS


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


def test_a_suite_with_the_name_of_another_check_is_refused(tmp_path: Path) -> None:
    """`SuiteSet` refuses an unknown table, and two suites of one name."""
    checks = SuiteChecks([ROWS, Suite("health", "orders", list)], Settings(home=tmp_path), lambda *_: validation())
    with pytest.raises(ConfigurationError, match="two checks named health"):
        checks.refuse_names(("health", "rules"))


def test_without_suites_there_is_nothing(tmp_path: Path) -> None:
    none = SuiteChecks([], Settings(home=tmp_path), lambda *_: validation())
    assert none.definitions() == dg.Definitions()


KEY = dg.AssetCheckKey(dg.AssetKey(["orders"]), "orders_rows")


@pytest.mark.parametrize(
    ("every", "cron"),
    [
        (timedelta(0), "* * * * *"),
        (timedelta(seconds=10), "* * * * *"),
        (timedelta(seconds=119), "* * * * *"),
        (timedelta(minutes=5), "*/5 * * * *"),
        (timedelta(minutes=7), "*/6 * * * *"),
        (timedelta(minutes=45), "*/30 * * * *"),
        (timedelta(hours=1), "0 * * * *"),
        (timedelta(hours=5), "0 */4 * * *"),
        (timedelta(days=1), "0 0 * * *"),
        (timedelta(days=30), "0 0 * * *"),
    ],
)
def test_a_duration_as_cron_is_never_longer_than_a_day_and_never_shorter_than_a_minute(
    every: timedelta, cron: str
) -> None:
    assert cron_of_interval(every) == cron


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A folder with the table, as a stream makes it."""
    (tmp_path / "orders" / "_delta_log").mkdir(parents=True)
    return tmp_path


def is_due(instance: dg.DagsterInstance, tables: Path, *, after: float = 0, home: str = "home") -> bool:
    """Whether the suite is due `after` seconds; `home` has the id of the code location."""
    due = due_checks(instance, [KEY], home_of(tables, home), time.time() + after)
    assert due in ([], [KEY])
    return bool(due)


def home_of(tables: Path, name: str = "home") -> Settings:
    return Settings(home=tables / name, tables_dir=str(tables), quality={"every": "5 minutes"})


def executed(instance: dg.DagsterInstance) -> None:
    """Report that the check was executed just now."""
    done = dg.AssetCheckEvaluation(asset_key=KEY.asset_key, check_name=KEY.name, passed=True)
    instance.report_runless_asset_event(done)


def test_a_suite_that_has_never_been_run_is_due_as_soon_as_its_table_is_there(
    instance: dg.DagsterInstance, tables: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert not is_due(instance, tmp_path_factory.mktemp("empty"))
    assert is_due(instance, tables)


def test_a_suite_whose_table_has_gone_since_its_last_execution_is_due(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    executed(instance)
    assert is_due(instance, tmp_path, after=900)


@pytest.mark.parametrize(("ago", "due"), [(60, False), (269, False), (271, True), (900, True)])
def test_a_suite_is_due_about_every_after_its_last_execution(
    instance: dg.DagsterInstance, tables: Path, ago: float, due: bool
) -> None:
    executed(instance)
    last = instance.event_log_storage.get_latest_asset_check_execution_by_key([KEY])[KEY].create_timestamp
    assert is_due(instance, tables, after=last + ago - time.time()) is due


@pytest.mark.parametrize(
    ("status", "due"),
    [
        (dg.DagsterRunStatus.QUEUED, False),
        (dg.DagsterRunStatus.STARTED, False),
        (dg.DagsterRunStatus.FAILURE, True),
        (dg.DagsterRunStatus.CANCELED, True),
    ],
)
def test_a_suite_that_waits_or_runs_is_not_doubled_however_long_it_takes(
    instance: dg.DagsterInstance, tables: Path, status: dg.DagsterRunStatus, due: bool
) -> None:
    planned(instance, status, KEY)
    assert is_due(instance, tables, after=86_400) is due


@pytest.mark.parametrize(
    ("status", "suites", "due"),
    [
        (dg.DagsterRunStatus.QUEUED, [], False),
        (dg.DagsterRunStatus.STARTED, ["orders_rows"], False),
        (dg.DagsterRunStatus.STARTED, ["stock_rows"], True),
        (dg.DagsterRunStatus.SUCCESS, ["orders_rows"], True),
    ],
)
def test_a_suite_that_a_run_of_the_job_evaluates_is_not_doubled(
    instance: dg.DagsterInstance, tables: Path, status: dg.DagsterRunStatus, suites: list[str], due: bool
) -> None:
    origin = RemoteJobOrigin(REPOSITORY, JOB)
    config, tags = run_config(home_of(tables), suites), job_tags(home_of(tables), QUALITY_KIND)
    instance.create_run_for_job(job_of_suites(), run_config=config, tags=tags, status=status, remote_job_origin=origin)
    assert is_due(instance, tables) is due
    assert is_due(instance, tables, home="another")


def job_of_suites() -> dg.JobDefinition:
    """A job like that of the suites."""

    @dg.op(name=OP, config_schema={"suites": [str]})
    def run_suites() -> None: ...

    @dg.job(name=JOB)
    def quality() -> None:
        run_suites()

    return quality


def outcome(name: str = "customer_not_null", **values: Any) -> CheckOutcome:
    return CheckOutcome(name, "expect_column_values_to_not_be_null", **{"passed": True, **values})


def failed(name: str = "customer_not_null", severity: Severity = "critical", **values: Any) -> CheckOutcome:
    return outcome(name, passed=False, severity=severity, **{"rows": 3120, "failing": 17, **values})


@pytest.mark.parametrize(
    ("outcomes", "passed", "severity"),
    [
        ((outcome(),), True, "ERROR"),
        ((outcome(), failed()), False, "ERROR"),
        ((outcome(), failed(severity="warning")), False, "WARN"),
        ((failed(severity="info"), failed("b", severity="warning")), False, "WARN"),
        ((failed(severity="warning"), failed("b")), False, "ERROR"),
        ((failed(severity="warning", error="no column customer"),), False, "ERROR"),
    ],
)
def test_a_check_is_an_error_unless_only_warnings_failed(
    outcomes: tuple[CheckOutcome, ...], passed: bool, severity: str
) -> None:
    verdict = of_validation(validation(*outcomes))
    assert (verdict.passed, verdict.severity.value) == (passed, severity)


def test_the_words_say_what_failed_by_how_many_rows_and_of_which_slice_the_worst_first() -> None:
    found = of_validation(
        validation(
            outcome("id_unique"),
            failed("late", severity="warning", failing=3000),
            failed("total_between", observed="17 of 3120 rows failed"),
            failed("mean_total", failing=None, observed="mean 12.5"),
            failed("broken", failing=None, error="no column `totl`"),
        )
    )
    text = found.text
    assert text.startswith("4 of 5 expectations failed on 3,120 rows: rows of versions 41 to 44.")
    assert "total_between: 17 of 3,120 rows;" in text
    assert "mean_total: observed mean 12.5" in text
    assert "broken could not be evaluated: no column `totl`" in text
    assert "late (warning): 3,000 of 3,120 rows" in text
    assert text.index("total_between") < text.index("late (warning)")
    well = of_validation(replace(validation(outcome()), since=None))
    assert well.text == "1 of 1 expectations passed on 3,120 rows: rows of versions 41 to 44."


def test_failing_rows_are_a_table_for_each_failing_expectation_and_their_number_is_bounded() -> None:
    rows = tuple({"order_id": number, "customer": None} for number in range(MOST_ROWS + 5))
    many = [failed(f"e{number}", sample=rows, failing=100 - number) for number in range(MOST_TABLES + 2)]
    metadata = of_validation(validation(*many, outcome("well", sample=rows))).figures
    tables = {name: value for name, value in metadata.items() if isinstance(value, dg.TableMetadataValue)}
    assert list(tables) == [f"failing rows: e{number}" for number in range(MOST_TABLES)]
    assert all(len(value.records) == MOST_ROWS for value in tables.values())
    assert metadata["further failing"].value == f"e{MOST_TABLES}, e{MOST_TABLES + 1}"


def test_cells_that_the_page_would_show_wrongly_are_text() -> None:
    shown = table(
        [
            {"id": 2**60, "price": Decimal("1.10"), "at": datetime(2026, 1, 2, tzinfo=UTC), "ratio": float("nan")},
            {"id": 7, "name": "x" * 500, "on": True},
        ]
    )
    first, second = (record.data for record in shown.records)
    assert first["id"] == str(2**60)
    assert (first["price"], first["at"], first["ratio"]) == ("1.10", "2026-01-02 00:00:00+00:00", "nan")
    assert first["name"] == "null"
    assert len(str(second["name"])) == 40
    assert [(c.name, c.type) for c in shown.schema.columns][-1] == ("on", "bool")
    assert {c.name: c.type for c in shown.schema.columns}["id"] == "str", "a column of two kinds is text"
    wide = table([{f"c{number}": number for number in range(40)}])
    assert [c.name for c in wide.schema.columns] == [f"c{number}" for number in range(10)]


def test_every_number_is_plotted_and_the_rest_is_what_an_operator_looks_for() -> None:
    first = FirstFailing("total_between", 2, 118, "3f2a", "recourse recover plan orders --before-first-broken x")
    found = validation(
        failed("total_between", number=0.5),
        failed("id_unique"),
        outcome("rows_enough", number=12),
        outcome("odd", number=float("inf")),
    )
    metadata = of_validation(replace(found, first_failing=first, docs="/home/docs/orders.html")).figures
    assert metadata["observed: total_between"] == dg.MetadataValue.float(0.5)
    assert metadata["observed: rows_enough"] == dg.MetadataValue.float(12.0)
    assert metadata["failing: id_unique"] == dg.MetadataValue.int(17)
    assert "failing: total_between" not in metadata, "one plot for each"
    assert "observed: odd" not in metadata
    assert metadata["command to put it right"].value == first.command
    assert metadata["batch of the first failing row"].value == "batch 118 of generation 2, by total_between"
    assert metadata["code that wrote it"].value == "3f2a"
    names = sorted(metadata)  # as the page does
    rows = names.index("failing: id_unique")
    assert (
        max(names.index(name) for name in ("batch of the first failing row", "command to put it right", "data docs"))
        < rows
    )
    assert metadata["data docs"] == dg.MetadataValue.path("/home/docs/orders.html")
    looked_at = {
        "stream": "orders",
        "slice": "rows of versions 41 to 44",
        "files": "3 of 120 files",
        "engine": "pandas",
    }
    expected = {**looked_at, "version": "44, rows that came after version 40"}
    assert {name: metadata[name].value for name in expected} == expected


def test_a_click_on_a_red_check_fills_the_launchpad_with_the_plan_that_its_command_makes() -> None:
    command = "recourse recover plan orders --before-first-broken total_between"
    first = FirstFailing("total_between", 2, 118, "3f2a", command)
    found = replace(validation(failed("total_between")), first_failing=first)
    link = str(of_validation(found, launchpad=Launchpad("my place")).figures["by one click"].value)
    address = urlsplit(link.partition("](")[2].partition(")")[0])
    assert address.path == "/locations/my%20place/jobs/recover/playground/setup"
    config = yaml.safe_load(parse_qs(address.query)["config"][0])
    job = dg.Definitions(jobs=[job_of_fields(["orders"])]).resolve_job_def("recover")
    launch = launch_of(dg.validate_run_config(job, config)["ops"]["recovery"]["config"])
    assert launch.do == "plan" and launch.request is not None
    assert (launch.request.streams, launch.request.target) == (("orders",), ("first-broken", "total_between"))
    warned = replace(found, first_failing=replace(first, command=""))
    assert "by one click" not in of_validation(warned).figures


def job_of_fields(streams: list[str]) -> dg.JobDefinition:
    """A job with the fields of `recover`."""

    @dg.op(name=STEP, config_schema=schema(streams))
    def recovery() -> None:
        """Nothing."""

    @dg.job(name=RECOVER)
    def recover() -> None:
        recovery()

    return recover


def test_failing_rows_are_left_out_where_the_settings_say_so() -> None:
    found = validation(failed("total_between", sample=({"id": 1},)))
    assert "failing rows: total_between" in of_validation(found).figures
    hidden = of_validation(found, show_rows=False)
    assert not any(name.startswith("failing rows") for name in hidden.figures)
    assert "17 of" in hidden.text and hidden.figures["failing: total_between"] == dg.MetadataValue.int(17)


def test_a_suite_that_is_green_again_says_that_earlier_rows_were_not_looked_at() -> None:
    newest = of_validation(replace(validation(outcome("rows_enough")), since=40))
    assert newest.text.endswith("Rows that came before were not looked at again.")
    assert "before" not in of_validation(replace(validation(outcome("rows_enough")), since=None)).text


def test_an_exception_is_red_with_its_text() -> None:
    verdict = of_exception("orders_rows", UsageError("there is no table orders", "start the stream"))
    assert (verdict.passed, verdict.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert "there is no table orders" in verdict.text
    assert "start the stream" in verdict.text
    assert "KeyError: 'x'" in of_exception("orders_rows", KeyError("x")).text
