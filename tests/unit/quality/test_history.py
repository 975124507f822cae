"""The history: each validation once and whole, also when runs are killed, repeated, or at the same time."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from deltalake import DeltaTable

from quality import history
from quality.history import SuiteHistory, newest_before
from quality.validation import CheckOutcome, Validation
from streaming_jobs.platform.append_table import UPKEEP_EVERY, AppendTable
from streaming_jobs.settings import Settings
from tests.conftest import SettingsFactory
from tests.support import validations

pytestmark = pytest.mark.slow

RED = CheckOutcome(
    "amount_between",
    "expect_column_values_to_be_between",
    passed=False,
    observed="2 of 3",
    number=66.6,
    rows=3,
    failing=2,
    sample=({"id": 1, "at": datetime(2026, 1, 1, tzinfo=UTC), "amount": None},),
)
GREEN = CheckOutcome(
    "id_not_null", "expect_column_values_to_not_be_null", passed=True, severity="warning", rows=3, failing=0
)


def validation(name: str, *, suite: str = "orders_rows", at: float | None = None, version: int = 3) -> Validation:
    started_at = time.time() if at is None else at
    values = {"table_id": "T1", "since": None, "code": "aaaa (0.1.0)", "version": version, "started_at": started_at}
    return replace(validations.validation(RED, GREEN, suite=suite), id=name, **values)  # type: ignore[arg-type]


@pytest.fixture
def home(settings: SettingsFactory) -> Settings:
    return settings()


def test_an_outcome_comes_back_as_it_was(home: Settings) -> None:
    now = round(time.time()) + 0.5
    assert history.history(home) == [] and history.record(home, validation("a", at=now))
    red, green = history.history(home)
    assert (red.validation, red.suite, red.expectation, red.version, red.code) == (
        "a", "orders_rows", "amount_between", 3, "aaaa (0.1.0)",
    )  # fmt: skip
    assert red.started_at == datetime.fromtimestamp(now, UTC) and red.since is None
    assert (red.passed, red.failing, red.looked_at, red.number) == (False, 2, 3, 66.6)
    assert red.sample == ({"id": 1, "at": "2026-01-01T00:00:00+00:00", "amount": None},)
    assert (green.passed, green.severity, green.sample) == (True, "warning", ())


def test_a_repeated_validation_is_in_it_once(home: Settings) -> None:
    assert [history.record(home, validation("a")) for _ in range(3)] == [True, False, False]
    assert len(history.history(home)) == 2


def test_the_newest_come_first_and_last_counts_runs(home: Settings) -> None:
    for name, at in (("old", 1.0), ("new", 3.0), ("middle", 2.0)):
        history.record(home, validation(name, at=time.time() + at))
    assert [each.validation for each in history.history(home)] == ["new", "new", "middle", "middle", "old", "old"]
    assert {each.validation for each in history.history(home, last=2)} == {"new", "middle"}
    assert [each.expectation for each in history.history(home, "orders_rows", "id_not_null")] == ["id_not_null"] * 3
    assert history.history(home, "another") == []


def test_the_last_version_is_that_of_the_same_table_and_of_whole_runs(home: Settings) -> None:
    history.record(home, validation("a", version=5))
    history.record(home, replace(validation("b", version=9), narrowed=True))
    history.record(home, validation("c", suite="another", version=8))
    judged = history.suite_progress(home, "orders_rows", "T1")
    assert judged.newest == 5 and judged.since(["amount_between", "id_not_null"]) == 5 and judged.red
    assert judged.since(["amount_between", "new"]) is None
    assert history.suite_progress(home, "orders_rows", "made anew") == history.SuiteProgress()


def test_what_could_not_be_evaluated_covers_nothing(home: Settings) -> None:
    now = time.time()
    history.record(home, validation("a", version=5, at=now))
    wrong = replace(RED, error="no such column")
    history.record(home, replace(validation("b", version=9, at=now + 1), outcomes=(wrong, GREEN)))
    judged = history.suite_progress(home, "orders_rows", "T1")
    assert judged.covered == {"amount_between": 5, "id_not_null": 9} and judged.newest == 9
    assert judged.since(["id_not_null", "amount_between"]) == 5 and judged.since([]) == 9


def test_a_check_reads_only_the_columns_and_the_outcomes_that_it_asks_for(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        outcomes = (replace(RED, passed=number != 2, number=float(number), error="broken" if number == 3 else ""),)
        history.record(home, replace(validation(f"{number}", at=time.time() + number), outcomes=outcomes))
    read: list[object] = []
    real = AppendTable.read

    def noted(table: AppendTable, wanted: object, columns: object = None) -> object:
        read.append(columns)
        return real(table, wanted, columns)  # type: ignore[arg-type]

    monkeypatch.setattr(AppendTable, "read", noted)
    past = SuiteHistory(home, "orders_rows")
    assert [each.number for each in past.newest("amount_between", 2)] == [2.0, 1.0]
    assert [each.number for each in past.passed("amount_between", 9)] == [1.0, 0.0]
    assert read == [["number", "observed", "started_at"]] * 2


def test_the_outcome_before_a_time_is_looked_for_in_older_files_only_if_an_expectation_has_no_recent_one(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)
    for name, days, suite in (("a", 90, "orders_rows"), ("b", 60, "rare"), ("c", 3, "orders_rows"), ("d", 0, "rare")):
        history.record(home, validation(name, at=(now - timedelta(days=days)).timestamp(), suite=suite))
    rows: list[int] = []
    real = AppendTable.read

    def noted(table: AppendTable, *given: Any) -> Any:
        rows.append((found := real(table, *given)).num_rows)
        return found

    monkeypatch.setattr(AppendTable, "read", noted)
    of_orders, of_rare = ((suite, "id_not_null") for suite in ("orders_rows", "rare"))
    before = newest_before(home, now - timedelta(days=1), {of_orders})
    assert before[of_orders].validation == "c" and rows == [2, 2]
    before = newest_before(home, now - timedelta(days=1), {of_orders, of_rare})
    assert (before[of_orders].validation, before[of_rare].validation) == ("c", "b")
    assert rows == [2, 2, 2, 6, 4]
    assert newest_before(home, now - timedelta(days=91), {of_orders}) == {}


def test_nobody_else_can_read_it(home: Settings) -> None:
    folder = history.quality_folder(home)
    folder.mkdir(parents=True, mode=0o755)
    folder.chmod(0o755)
    history.record(home, validation("a"))
    assert folder.stat().st_mode & 0o077 == 0


def test_old_rows_leave_and_the_number_of_files_stays_small(settings: SettingsFactory) -> None:
    home = settings({"quality.history_days": 10})
    for day in range(60):
        history.record(home, validation(f"v{day}", at=time.time() - (60 - day) * 86_400))
    ages = [(datetime.now(UTC) - each.started_at).days for each in history.history(home)]
    assert max(ages) <= 12 and min(ages) <= 1
    assert len(DeltaTable(history.folder(home)).file_uris()) <= 30


def test_the_log_is_cleaned_up_and_transactions_are_forgotten(home: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2 * UPKEEP_EVERY):
        history.record(home, validation(f"v{number}"))
    log = history.folder(home) / "_delta_log"
    assert list(log.glob("*.checkpoint.parquet"))
    assert len({each.validation for each in history.history(home, last=1000)}) == 2 * UPKEEP_EVERY


def _add(home: str, names: list[str]) -> None:
    settings = Settings.load({"home": home})
    for name in names:
        history.record(settings, validation(name))


def test_two_processes_at_once_both_add_theirs_and_a_shared_one_is_in_it_once(home: Settings) -> None:
    spawn = multiprocessing.get_context("spawn")
    names = [[f"p{p}-{n}" if n % 5 else f"both-{n}" for n in range(15)] for p in (0, 1)]
    processes = [spawn.Process(target=_add, args=(str(home.home), each)) for each in names]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    rows = history.history(home)
    assert sorted({each.validation for each in rows}) == sorted({name for each in names for name in each})
    assert len(rows) == 2 * len({name for each in names for name in each})


KILLED = """
import os, sys
import deltalake
from quality import history
from streaming_jobs.settings import Settings
sys.path.insert(0, {root!r})
from tests.unit.quality.test_history import validation
real = deltalake.write_deltalake
def write(*args, **more):
    if {after}:
        real(*args, **more)
    os._exit(9)
deltalake.write_deltalake = write
history.record(Settings.load({{"home": {home!r}}}), validation("killed"))
"""


@pytest.mark.parametrize("after", [False, True], ids=["before the commit", "after the commit"])
def test_a_killed_run_leaves_no_half_history_and_its_repetition_no_double(home: Settings, after: bool) -> None:
    root = str(__file__).split("/tests/")[0]
    script = KILLED.format(root=root, after=after, home=str(home.home))
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, check=False)
    assert done.returncode == 9
    assert len(history.history(home)) == (2 if after else 0)
    history.record(home, validation("killed"))
    assert len(history.history(home)) == 2
