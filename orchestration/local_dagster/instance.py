"""What Recourse needs of a Dagster instance, compared with its settings: `recourse doctor --dagster`.

`recourse up` writes an instance of its own (`local_dagster/dagster_home.py`). That of a team is the team's: nothing
here changes it, and each check says what differs, what follows, and what to write into dagster.yaml. Dagster makes the
databases of an instance when it is opened: one that has no SQLite files yet is not opened. In a PostgreSQL database
without tables, Dagster creates them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import dagster as dg
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.instance.config import ConcurrencyConfig, PoolGranularity
from dagster._core.instance.ref import InstanceRef
from dagster._core.launcher import DefaultRunLauncher
from dagster._core.scheduler.instigation import TickStatus
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage

from orchestration.bundle.job import Continuous, Job, Timed
from orchestration.local_dagster.dagster_home import longest_stop
from orchestration.local_dagster.session_logs import SessionLogManager
from orchestration.sessions.ownership import KIND_TAG, QUALITY_KIND
from orchestration.sessions.supervisor import GRACE
from orchestration.sessions.tasks import pool_of
from streaming_jobs.preflight.doctor import DoctorCheck
from streaming_jobs.settings import Settings

ROOM = 4
"""Places in the queue's limit beside those of continuous sessions: for suites, a recovery, a schedule, a preview."""


def find(settings: Settings) -> Path | None:
    """The folder of the instance: DAGSTER_HOME, else that of `recourse up`; None if neither is there."""
    named = os.environ.get("DAGSTER_HOME")
    folder = Path(named).expanduser() if named else settings.dagster_home
    return folder if (folder / "dagster.yaml").is_file() else None


def checks_of_home(settings: Settings, jobs: Sequence[Job]) -> list[DoctorCheck]:
    """The checks of the instance that `find` finds; `jobs` are those of the job YAML."""
    folder = find(settings)
    if folder is None:
        named = os.environ.get("DAGSTER_HOME")
        found = f"no dagster.yaml in {named or f'{settings.dagster_home}, and DAGSTER_HOME is not set'}"
        return [DoctorCheck("Dagster", False, found, "set DAGSTER_HOME to the folder of the instance's dagster.yaml")]
    try:
        if (missing := _missing_database(folder)) is not None:
            found = f"the instance of {folder} has never been started: there is no {missing}"
            return [DoctorCheck("Dagster", False, found, "start its daemon or webserver once, then look again")]
        instance = dg.DagsterInstance.from_config(str(folder))
    except Exception as error:  # noqa: BLE001 - of its storage or its YAML; the text may have the password of a database
        found = f"the instance of {folder} cannot be opened: {type(error).__name__}"
        return [DoctorCheck("Dagster", False, found, "`dagster instance info` shows why")]
    with instance:
        return [DoctorCheck("Dagster", True, f"instance of {folder}"), *checks(instance, settings, jobs)]


def _missing_database(folder: Path) -> Path | None:
    """The database of runs that Dagster would make; None if it is there, or is no SQLite file."""
    instance = InstanceRef.from_dir(str(folder))
    sqlite = {"SqliteRunStorage": "runs.db", "DagsterSqliteStorage": "history/runs.db"}
    for data in (instance.run_storage_data, instance.storage_data):
        if data is not None and data.class_name in sqlite:
            base = data.config_dict["base_dir"]
            place = Path(os.environ.get(base["env"], "") if isinstance(base, dict) else base) / sqlite[data.class_name]
            return None if place.is_file() else place
    return None


def checks(instance: dg.DagsterInstance, settings: Settings, jobs: Sequence[Job]) -> Iterator[DoctorCheck]:
    """One check for each thing that is needed, in the order of what goes wrong first without it."""
    concurrency = instance.get_concurrency_config()
    yield _queue(concurrency, jobs)
    yield from _pools(instance, concurrency, settings, jobs)
    yield _suites(concurrency)
    yield from _monitoring(instance, settings, jobs)
    yield _launcher(instance)
    yield _storage(instance)
    yield _events(instance, settings)
    yield _sensors(instance)
    yield _ticks(instance)
    yield _logs(instance, settings)


def _queue(concurrency: ConcurrencyConfig, jobs: Sequence[Job]) -> DoctorCheck:
    """A continuous session has a place in the queue's limit for ever."""
    name, sessions = "Dagster queue", sum(_runs_always(job) for job in jobs)
    if (queue := concurrency.run_queue_config) is None:
        fix = "remove run_coordinator from dagster.yaml: the default has a queue"
        return DoctorCheck(name, None, "runs start at once: no pool and no limit holds them", fix)
    most = queue.max_concurrent_runs
    if most < 0:
        return DoctorCheck(name, True, "any number of runs at a time")
    found = f"{most} runs at a time, of which {sessions} are continuous sessions"
    fix = f"concurrency.runs.max_concurrent_runs: at least {sessions + ROOM}, and what others run at a time"
    if most <= sessions:
        return DoctorCheck(name, False, f"{found}: nothing else would ever start", fix)
    return DoctorCheck(name, True if most >= sessions + ROOM else None, found, "" if most >= sessions + ROOM else fix)


def _pools(
    instance: dg.DagsterInstance, concurrency: ConcurrencyConfig, settings: Settings, jobs: Sequence[Job]
) -> Iterator[DoctorCheck]:
    """The pool of each job: a run that is launched beside the session waits for its end instead of failing."""
    storage, name = instance.event_log_storage, "Dagster pools"
    if not storage.supports_global_concurrency_limits:
        yield DoctorCheck(name, None, f"{type(storage).__name__} has no pools", "use SQLite or PostgreSQL")
        return
    limits = {info.name: info.limit for info in storage.get_pool_limits()}
    default = concurrency.pool_config.default_pool_limit
    wrong = {pool: limit for job in jobs if (limit := limits.get(pool := pool_of(settings.dagster, job), default)) != 1}
    if never := sorted(pool for pool, limit in wrong.items() if limit == 0):
        yield DoctorCheck(name, False, f"limit 0, so no run starts: {', '.join(never)}", _set_limit(never[0]))
    elif wrong:
        found = f"without limit 1: {', '.join(sorted(wrong))}; a second launch fails where it would wait"
        more = "" if len(wrong) == 1 else "; the same for the others"
        yield DoctorCheck(name, None, found, f"{_set_limit(min(wrong))}{more}")
    else:
        yield DoctorCheck(name, True, "one run at a time of each job")
    by_run = concurrency.pool_config.pool_granularity is PoolGranularity.RUN
    freed = instance.run_monitoring_settings.get("free_slots_after_run_end_seconds")
    if not by_run and not freed:
        found = "pools count steps: the place of a killed run is never freed"
        fix = "concurrency.pools.granularity: run; or run_monitoring.free_slots_after_run_end_seconds: 60"
        yield DoctorCheck(name, None, found, fix)


def _set_limit(pool: str) -> str:
    return f"dagster instance concurrency set {pool} 1"


def _suites(concurrency: ConcurrencyConfig) -> DoctorCheck:
    queue = concurrency.run_queue_config
    limits = queue.tag_concurrency_limits if queue is not None else []
    ours = [limit for limit in limits or () if limit["key"] == KIND_TAG and limit.get("value") == QUALITY_KIND]
    if any(limit["limit"] == 1 for limit in ours):
        return DoctorCheck("Dagster suites", True, "one run of suites at a time")
    fix = f"concurrency.runs.tag_concurrency_limits: {{key: {KIND_TAG}, value: {QUALITY_KIND}, limit: 1}}"
    return DoctorCheck("Dagster suites", None, "a second run of suites waits in its process, with its memory", fix)


def _monitoring(instance: dg.DagsterInstance, settings: Settings, jobs: Sequence[Job]) -> Iterator[DoctorCheck]:
    name = "Dagster monitoring"
    if not instance.run_monitoring_enabled:
        found = "off: a run that never reports, as of a worker that could not start, stays in progress"
        yield DoctorCheck(name, None, found, "run_monitoring.enabled: true")
    else:
        needed = int(longest_stop(settings) + GRACE)
        found = f"a run has {instance.run_monitoring_cancel_timeout_seconds} s to stop"
        enough = instance.run_monitoring_cancel_timeout_seconds > needed
        fix = "" if enough else f"run_monitoring.cancel_timeout_seconds: {needed + 60}"
        why = "" if enough else f", and a session may take {needed} s: it is shown as canceled while its driver runs"
        yield DoctorCheck(name, True if enough else None, found + why, fix)
    if limit := instance.run_monitoring_max_runtime_seconds:
        hit = [job.key for job in jobs if isinstance(job.trigger, Timed) and not job.timeout_seconds]
        hits = " and ".join(["recoveries", *([f"the jobs {', '.join(hit)}"] if hit else [])])
        found = f"{hits} end after {limit} s; continuous sessions do not"
        fix = "no run_monitoring.max_runtime_seconds; or `timeout_seconds` for these jobs, and shorter recoveries"
        yield DoctorCheck("Dagster max_runtime", None, found, fix)


def _launcher(instance: dg.DagsterInstance) -> DoctorCheck:
    name, launcher = "Dagster launcher", type(instance.run_launcher).__name__
    if isinstance(instance.run_launcher, DefaultRunLauncher):
        return DoctorCheck(name, True, f"{launcher}: workers on the host of the code server")
    fix = "give every worker the same home, on a file system with flock"
    if not instance.run_monitoring_enabled:
        found = f"{launcher} without run_monitoring: nobody fails the run of a lost host that has not reported"
        return DoctorCheck(name, False, found, f"run_monitoring.enabled: true; {fix}")
    return DoctorCheck(name, None, f"{launcher}: workers may be on other hosts", fix)


def _storage(instance: dg.DagsterInstance) -> DoctorCheck:
    name, storage = "Dagster storage", instance.event_log_storage
    kind = type(storage).__name__
    if not isinstance(storage, SqlEventLogStorage):
        found = f"{kind} is no SQL: a check that was executed from its page counts only until its table is written"
        return DoctorCheck(name, None, found, "use PostgreSQL")
    if "Sqlite" in kind:  # Dagster has three of them
        return DoctorCheck(name, None, f"{kind}: one writer at a time, on one host", "storage.postgres, for a team")
    return DoctorCheck(name, True, kind)


def _events(instance: dg.DagsterInstance, settings: Settings) -> DoctorCheck:
    name = "Dagster retention"
    if not settings.dagster.own_instance:
        found = "events of tables stay: about 12 MB a day for a table that reports each minute"
        fix = "a longer dagster.observe_every; or dagster.own_instance = true if nobody else uses the instance"
        return DoctorCheck(name, None, found, fix)
    if Path(instance.root_directory).resolve() == settings.dagster_home.resolve():
        return DoctorCheck(name, True, f"events of tables are deleted after {settings.dagster.keep_runs.days} days")
    found = "dagster.own_instance is set: old events are deleted by SQL, also verdicts of others without a run"
    return DoctorCheck(name, None, found, "dagster.own_instance = false if anybody else uses the instance")


def _sensors(instance: dg.DagsterInstance) -> DoctorCheck:
    if instance.get_settings("sensors").get("use_threads"):
        return DoctorCheck("Dagster sensors", True, "tick beside each other")
    found = "tick one after the other: a receiver or broker that does not answer holds keepalive up"
    return DoctorCheck("Dagster sensors", None, found, "sensors: {use_threads: true, num_workers: 4}")


def _ticks(instance: dg.DagsterInstance) -> DoctorCheck:
    kept = instance.get_tick_retention_settings(InstigatorType.SENSOR).get(TickStatus.SKIPPED, -1)
    if 0 <= kept <= 7:
        return DoctorCheck("Dagster ticks", True, f"skipped ones are kept for {kept} days")
    found = "skipped ticks are kept for " + ("ever" if kept < 0 else f"{kept} days") + ": keepalive has 8,640 a day"
    return DoctorCheck("Dagster ticks", None, found, "retention.sensor.purge_after_days.skipped: 1")


def _logs(instance: dg.DagsterInstance, settings: Settings) -> DoctorCheck:
    manager = instance.compute_log_manager
    if isinstance(manager, SessionLogManager):
        return DoctorCheck("Dagster logs", True, "a run shows the log of its driver")
    found = f"{type(manager).__name__}: a run names the log of its driver, in {settings.logs}, and does not show it"
    return DoctorCheck("Dagster logs", True, found)


def _runs_always(job: Job) -> bool:
    return isinstance(job.trigger, Continuous) and not job.trigger.paused
