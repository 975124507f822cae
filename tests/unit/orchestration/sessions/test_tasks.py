"""Tasks of a job that are no sessions: order, arguments, retries and time limit, run by Dagster in this process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import dagster as dg
import pytest

from orchestration.bundle.job import Job, Parameter, Task
from orchestration.sessions import child_run
from orchestration.sessions.definitions import bundle_job
from orchestration.sessions.ownership import KIND_TAG, TASKS_KIND
from orchestration.sessions.tasks import before, recourse_command, task_assets, task_key
from streaming_jobs.settings import DagsterSettings, Settings

PLAN = Task("plan", "recourse-streams", "recourse", ("recover", "plan", "{{job.parameters.stream}}"))
CHECK = Task("check-all", "recourse-streams", "recourse", ("quality", "run"), depends_on=("plan",))
SESSION = Task("session", "recourse-streams", "recourse-session", ("--streams", "orders"))


def job_of(*tasks: Task) -> Job:
    return Job("nightly", "nightly", "", {}, (Parameter("stream", "orders"),), None, 0, tasks, Path("/x.yml"))


class Runner:
    """Runs the tasks of a job, each as a Python script that first notes its arguments in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = Settings(home=folder / "home")

    def run(self, job: Job, scripts: Mapping[str, str], config: Mapping[str, str] | None = None) -> list[str]:
        def command(arguments: Sequence[str]) -> list[str]:
            note = f"import sys; open({str(self.folder / 'ran')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
            script = scripts.get(arguments[0], "").replace("RAN", repr(str(self.folder / "ran")))
            return [sys.executable, "-c", note + script, *arguments]

        assets = task_assets(job, self.settings, (), job.defaults, command)
        resolved = dg.Definitions(assets=assets, jobs=[bundle_job(job, self.settings, assets)]).resolve_job_def(job.key)
        given = {"ops": {asset.op.name: {"config": config} for asset in assets}} if config else None
        with dg.DagsterInstance.ephemeral() as instance:
            self.result = resolved.execute_in_process(instance=instance, raise_on_error=False, run_config=given)
            self.tags = instance.get_runs()[0].tags
        file = self.folder / "ran"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def test_tasks_run_in_their_order_with_the_job_s_parameters(runner: Runner) -> None:
    assert runner.run(job_of(CHECK, PLAN), {}) == ["recover plan orders", "quality run"]
    assert runner.result.success and runner.tags[KIND_TAG] == TASKS_KIND
    made = {event.asset_key for event in runner.result.get_asset_materialization_events()}
    assert made == {task_key(DagsterSettings(), job_of(), PLAN), task_key(DagsterSettings(), job_of(), CHECK)}


def test_a_parameter_of_the_run_comes_before_the_default(runner: Runner) -> None:
    assert runner.run(job_of(PLAN), {}, {"stream": "totals"}) == ["recover plan totals"]


def test_what_depends_on_a_failed_task_does_not_run(runner: Runner) -> None:
    assert runner.run(job_of(PLAN, CHECK), {"recover": "sys.exit(1)"}) == ["recover plan orders"]
    assert not runner.result.success
    (failed,) = [event for event in runner.result.all_events if event.is_step_failure]
    assert "task plan: the command ended with exit code 1" in str(failed.step_failure_data.error)


AT_FIRST = "sys.exit(CODE if open(RAN).read().count('recover') < 3 else 0)"
"""Fails twice."""


@pytest.mark.parametrize(
    ("code", "retries", "tries"), [(1, 2, 3), (1, 1, 2), (1, -1, 3), (1, 0, 1), (2, 2, 1), (78, 2, 1)]
)
def test_a_failed_task_is_tried_again_unless_it_fails_for_good(
    runner: Runner, code: int, retries: int, tries: int
) -> None:
    task = Task(*_plan(), max_retries=retries)
    ran = runner.run(job_of(task), {"recover": AT_FIRST.replace("CODE", str(code))})
    assert (len(ran), runner.result.success) == (tries, tries == 3)


@pytest.mark.parametrize(("again", "tries"), [(False, 1), (True, 2)])
def test_a_task_ends_at_its_time_limit_and_is_tried_again_if_the_job_says_so(
    runner: Runner, again: bool, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestration.sessions.child_run.POLL", 0.05)
    task = Task(*_plan(), max_retries=1, retry_on_timeout=again, timeout_seconds=1)
    ran = runner.run(job_of(task), {"recover": "import time; time.sleep(60)"})
    assert (len(ran), runner.result.success) == (tries, False)
    failed = [event for event in runner.result.all_events if event.is_step_failure]
    assert "it has lasted 1 second, its time limit" in str(failed[-1].step_failure_data.error)


def test_a_task_whose_code_server_is_gone_is_not_tried_again(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: int) -> None:
        raise child_run.Orphaned("the code server that this run belonged to is gone")

    monkeypatch.setattr(child_run, "check_parents", gone)
    runner.run(job_of(Task(*_plan(), max_retries=3)), {"recover": "import time; time.sleep(60)"})
    assert not runner.result.success
    assert not [event for event in runner.result.all_events if event.is_step_up_for_retry]


def test_the_runs_of_a_job_without_a_session_follow_each_other(runner: Runner) -> None:
    def pools(job: Job) -> set[str | None]:
        assets = task_assets(job, runner.settings, (), job.defaults)
        return {asset.op.pool for asset in assets}

    assert pools(job_of(PLAN, CHECK)) == {"session_nightly"}
    assert pools(job_of(SESSION, PLAN)) == {None}, "the session's asset has it"


def test_a_task_waits_for_the_session_s_tables_and_a_session_for_tasks() -> None:
    tables = [dg.AssetKey("orders"), dg.AssetKey("orders_dead_letters")]
    after = Task(*_plan()[:3], ("quality", "run"), depends_on=("session",))
    job = job_of(SESSION, after)
    assert before(DagsterSettings(), job, after, tables) == tables
    first = Task(*SESSION_FIELDS, depends_on=("plan",))
    job = job_of(PLAN, first)
    assert before(DagsterSettings(), job, first, ()) == [task_key(DagsterSettings(), job, PLAN)]


def test_the_command_is_the_command_line_of_this_python() -> None:
    assert recourse_command(["quality", "run"]) == [sys.executable, "-m", "orchestration.cli", "quality", "run"]


SESSION_FIELDS = (SESSION.key, SESSION.package_name, SESSION.entry_point, SESSION.parameters)


def _plan() -> tuple[str, str, str, tuple[str, ...]]:
    return PLAN.key, PLAN.package_name, PLAN.entry_point, PLAN.parameters
