"""The bundle format as pydantic models: what Recourse honours, and by `noted` what only Databricks uses.

Read after the target's overrides are merged and all references are resolved (`job_yaml.py`).
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from datetime import date
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import BeforeValidator, Field, create_model, field_validator, model_validator

from orchestration.bundle import databricks as db
from orchestration.bundle.databricks import COMPUTE, ELSEWHERE, LIBRARIES, RIGHTS, WORKSPACE, noted
from orchestration.bundle.fields import Count, Fields, Flag, Noted, Scalar, Section, Shape, Text, refusal
from orchestration.bundle.job import COMMAND, COMMANDS, ENTRY_POINT, RUN_REFERENCE, is_ours, parameter_of
from orchestration.bundle.quartz import Quartz
from streaming_jobs.text.spelling import nearest_zone

TAKEN = {"bool", "conf", "config", "context", "dict", "float", "input", "int", "meta", "output", "str", "type"}
TAKEN |= {"arg_dict", "input_arg_dict", "output_arg_dict", *keyword.kwlist}
"""Names that Dagster does not accept for a job."""
KEY = re.compile(r"[a-z][a-z0-9_]{0,62}")
_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_TASK_KEY = re.compile(r"[A-Za-z0-9_-]{1,100}")
_TAG = re.compile(r"[A-Za-z0-9_.-]{1,63}")

Pause = Annotated[Literal["UNPAUSED", "PAUSED"], Scalar]


class Pausable(Fields):
    pause_status: Pause | None = None

    @property
    def paused(self) -> bool:
        return self.pause_status == "PAUSED"


class ContinuousFields(Pausable):
    task_retry_mode: Annotated[
        Literal["NEVER", "ON_FAILURE"] | None, Scalar, Noted("keepalive starts a session that failed again")
    ] = None
    maintenance_window: Any = noted(db.MAINTENANCE, "nothing here is maintained by others")


class ScheduleFields(Pausable):
    quartz_cron_expression: Text
    timezone_id: Text
    sql_condition: Any = noted(db.SQL_CONDITION, WORKSPACE)

    @model_validator(mode="after")
    def _can_be_kept(self) -> Self:
        try:
            Quartz.of(self.quartz_cron_expression)
        except ValueError as error:
            problem = f"'{self.quartz_cron_expression}': {error}"
            raise refusal(problem, below="quartz_cron_expression") from error
        try:
            ZoneInfo(self.timezone_id)
        except (OSError, ValueError, KeyError) as error:
            problem = f"no time zone '{self.timezone_id}'"
            raise refusal(problem, nearest_zone(self.timezone_id), below="timezone_id") from error
        return self


class PeriodicFields(Fields):
    interval: Count
    unit: Annotated[Literal["MINUTES", "HOURS", "DAYS", "WEEKS"], Scalar]

    @model_validator(mode="after")
    def _passes(self) -> Self:
        if self.interval == 0:
            raise refusal("'0' is no interval", below="interval")
        return self


_WATCHES = "nothing here watches for that, so the job is started by hand"


class TriggerFields(Pausable):
    periodic: Annotated[PeriodicFields | None, Section] = None
    job_completion: Any = noted(db.JOB_COMPLETION, _WATCHES)
    file_arrival: Any = noted(db.FILE_ARRIVAL, _WATCHES)
    table_update: Any = noted(db.TABLE_UPDATE, _WATCHES)
    model: Any = noted(db.MODEL_TRIGGER, _WATCHES)
    sql_condition: Any = noted(db.SQL_CONDITION, WORKSPACE)

    @model_validator(mode="after")
    def _one(self) -> Self:
        kinds = [name for name in type(self).model_fields if name not in _BESIDE and getattr(self, name) is not None]
        if len(kinds) != 1:
            raise refusal(f"has {' and '.join(kinds) or 'no trigger'}", "keep exactly one")
        return self


_BESIDE = ("pause_status", "sql_condition")


class AnyTrigger(TriggerFields):
    """An item of `triggers`."""

    continuous: Annotated[ContinuousFields | None, Section] = None
    schedule: Annotated[ScheduleFields | None, Section] = None

    @model_validator(mode="after")
    def _pause_status_beside(self) -> Self:
        for name in ("continuous", "schedule"):
            if (one := getattr(self, name)) is not None and one.pause_status is not None:
                raise refusal("has pause_status inside", "write pause_status beside it, in the item", below=name)
        return self


Metric = Literal[
    "RUN_DURATION_SECONDS",
    "STREAMING_BACKLOG_BYTES",
    "STREAMING_BACKLOG_RECORDS",
    "STREAMING_BACKLOG_SECONDS",
    "STREAMING_BACKLOG_FILES",
]


class Rule(Fields):
    metric: Annotated[Metric, Scalar]
    op: Annotated[Literal["GREATER_THAN"], Scalar]
    value: Count


class Health(Fields):
    rules: list[Rule] = Field(default_factory=list)


class Queue(Fields):
    enabled: Flag


class Email(Fields):
    on_start: list[Text] = Field(default_factory=list)
    on_success: list[Text] = Field(default_factory=list)
    on_failure: list[Text] = Field(default_factory=list)
    on_duration_warning_threshold_exceeded: list[Text] = Field(default_factory=list)
    on_streaming_backlog_exceeded: list[Text] = Field(default_factory=list)
    on_maintenance_start: Any = noted(db.Names, "nothing here is maintained by others")
    on_maintenance_complete: Any = noted(db.Names, "nothing here is maintained by others")
    no_alert_for_skipped_runs: Any = noted(db.AnyFlag, "a tick that is skipped starts no run here")


class Destination(Fields):
    id: db.AnyText


class Webhooks(Fields):
    on_start: list[Destination] = Field(default_factory=list)
    on_success: list[Destination] = Field(default_factory=list)
    on_failure: list[Destination] = Field(default_factory=list)
    on_duration_warning_threshold_exceeded: list[Destination] = Field(default_factory=list)
    on_streaming_backlog_exceeded: list[Destination] = Field(default_factory=list)
    on_maintenance_start: Any = noted(db.items(Destination), "nothing here is maintained by others")
    on_maintenance_complete: Any = noted(db.items(Destination), "nothing here is maintained by others")


class NotificationSettings(Fields):
    no_alert_for_skipped_runs: Any = noted(db.AnyFlag, "a tick that is skipped starts no run here")
    no_alert_for_canceled_runs: Any = noted(db.AnyFlag, "a run that a person stopped is never reported here")
    alert_on_last_attempt: Any = noted(db.AnyFlag, "a run is reported when its last attempt has failed")


class Wheel(Fields):
    package_name: Text
    entry_point: Text
    parameters: list[Text] = Field(default_factory=list)
    named_parameters: dict[str, Text] = Field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return is_ours(self.package_name, self.entry_point)

    @property
    def arguments(self) -> tuple[str, ...]:
        return (*self.parameters, *(f"--{name}={value}" for name, value in self.named_parameters.items()))

    @model_validator(mode="after")
    def _can_run(self) -> Self:
        if self.parameters and self.named_parameters:
            raise refusal("has both parameters and named_parameters", "keep one")
        if not self.ours:
            return self
        if self.entry_point not in (ENTRY_POINT, COMMAND):
            next_step = f"write {ENTRY_POINT} for a session, {COMMAND} for a quality run or a recovery"
            raise refusal(f"entry_point '{self.entry_point}' starts no session", next_step, below="entry_point")
        if self.entry_point == COMMAND and not any(tuple(self.parameters[: len(words)]) == words for words in COMMANDS):
            known = ", ".join(f"[{', '.join(words)}]" for words in COMMANDS)
            problem = f"'{' '.join(self.parameters[:2])}' is not a command that a task runs"
            raise refusal(problem, f"parameters begin with one of: {known}", below="parameters")
        return self


class Dependency(Fields):
    task_key: Text
    outcome: Any = noted(db.AnyText, ELSEWHERE)


RunIf = Literal["ALL_SUCCESS", "ALL_DONE", "NONE_FAILED", "AT_LEAST_ONE_SUCCESS", "ALL_FAILED", "AT_LEAST_ONE_FAILED"]
RETRIES = ("max_retries", "min_retry_interval_millis", "retry_on_timeout")


def _of_each(value: Any) -> Any:
    """Checks the task inside a `for_each_task`."""
    if isinstance(value, Mapping) and isinstance(value.get("task"), Mapping):
        TaskFields.model_validate(value["task"])
    return value


class TaskFields(Fields):
    task_key: Text
    description: Text = ""
    depends_on: list[Dependency] = Field(default_factory=list)
    run_if: Annotated[RunIf, Scalar] = "ALL_SUCCESS"
    python_wheel_task: Wheel | None = None
    max_retries: int = 0
    min_retry_interval_millis: Count = 0
    retry_on_timeout: Flag = False
    timeout_seconds: Count = 0
    disabled: Flag = False
    job_cluster_key: Text = ""
    environment_key: Text = ""
    environment_variables_key: Any = noted(db.AnyText, LIBRARIES)
    existing_cluster_id: Any = noted(db.AnyText, COMPUTE)
    new_cluster: Any = noted(db.NEW_CLUSTER, f"{COMPUTE}; its spark_conf is used")
    libraries: Any = noted(db.items(db.LIBRARY), LIBRARIES)
    compute: Any = noted(db.shape("hardware_accelerator"), COMPUTE)
    disable_auto_optimization: Any = noted(db.AnyFlag, COMPUTE)
    health: Health = Field(default_factory=Health)
    email_notifications: Email = Field(default_factory=Email)
    webhook_notifications: Webhooks = Field(default_factory=Webhooks)
    notification_settings: NotificationSettings = Field(default_factory=NotificationSettings)
    ai_function_task: Any = noted(db.OTHER_TASKS["ai_function_task"], ELSEWHERE)
    ai_runtime_task: Any = noted(db.OTHER_TASKS["ai_runtime_task"], ELSEWHERE)
    alert_task: Any = noted(db.OTHER_TASKS["alert_task"], ELSEWHERE)
    clean_rooms_notebook_task: Any = noted(db.OTHER_TASKS["clean_rooms_notebook_task"], ELSEWHERE)
    condition_task: Any = noted(db.OTHER_TASKS["condition_task"], ELSEWHERE)
    dashboard_task: Any = noted(db.OTHER_TASKS["dashboard_task"], ELSEWHERE)
    dbt_cloud_task: Any = noted(db.OTHER_TASKS["dbt_cloud_task"], ELSEWHERE)
    dbt_platform_task: Any = noted(db.OTHER_TASKS["dbt_platform_task"], ELSEWHERE)
    dbt_task: Any = noted(db.OTHER_TASKS["dbt_task"], ELSEWHERE)
    for_each_task: Annotated[Any, BeforeValidator(_of_each)] = noted(db.OTHER_TASKS["for_each_task"], ELSEWHERE)
    gen_ai_compute_task: Any = noted(db.OTHER_TASKS["gen_ai_compute_task"], ELSEWHERE)
    notebook_task: Any = noted(db.OTHER_TASKS["notebook_task"], ELSEWHERE)
    pipeline_task: Any = noted(db.OTHER_TASKS["pipeline_task"], ELSEWHERE)
    power_bi_task: Any = noted(db.OTHER_TASKS["power_bi_task"], ELSEWHERE)
    python_operator_task: Any = noted(db.OTHER_TASKS["python_operator_task"], ELSEWHERE)
    run_job_task: Any = noted(db.OTHER_TASKS["run_job_task"], ELSEWHERE)
    spark_jar_task: Any = noted(db.OTHER_TASKS["spark_jar_task"], ELSEWHERE)
    spark_python_task: Any = noted(db.OTHER_TASKS["spark_python_task"], ELSEWHERE)
    spark_submit_task: Any = noted(db.OTHER_TASKS["spark_submit_task"], ELSEWHERE)
    sql_task: Any = noted(db.OTHER_TASKS["sql_task"], ELSEWHERE)

    @property
    def ours(self) -> bool:
        """True if the task runs on this machine."""
        return self.python_wheel_task is not None and self.python_wheel_task.ours and not self.disabled

    @model_validator(mode="before")
    @classmethod
    def _is_one_task(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            kinds = [name for name in ("python_wheel_task", *db.OTHER_TASKS) if name in value]
            if len(kinds) != 1:
                raise refusal(f"has {' and '.join(kinds) or 'nothing to run'}", "a task is of exactly one kind")
        return value

    @model_validator(mode="after")
    def _can_be_kept(self) -> Self:
        if not _TASK_KEY.fullmatch(self.task_key):
            usable = "use letters, digits, '_' and '-', 100 at most"
            raise refusal(f"'{self.task_key}' is not a task key", usable, below="task_key")
        if self.max_retries < -1:
            raise refusal(f"'{self.max_retries}' is not a number of retries; -1 is without end", below="max_retries")
        if self.ours and self.run_if != "ALL_SUCCESS":
            problem = f"run_if: {self.run_if} cannot be kept here: a task here runs when all before it have succeeded"
            raise refusal(problem, "write ALL_SUCCESS, or give the task a job of its own", below="run_if")
        return self


class ParameterFields(Fields):
    name: Text
    default: Text


class JobCluster(Fields):
    job_cluster_key: Text
    new_cluster: Any = noted(db.NEW_CLUSTER, f"{COMPUTE}; its spark_conf is used")
    serverless_compute: Any = noted(db.shape("policy_id"), COMPUTE)
    serverless_compute_id: Any = noted(db.AnyText, COMPUTE)


class JobFields(Fields):
    name: Text = ""
    description: Text = ""
    tags: dict[str, Text] = Field(default_factory=dict)
    parameters: list[ParameterFields] = Field(default_factory=list)
    continuous: Annotated[ContinuousFields | None, Section] = None
    schedule: Annotated[ScheduleFields | None, Section] = None
    trigger: Annotated[TriggerFields | None, Section] = None
    triggers: list[AnyTrigger] = Field(default_factory=list)
    max_concurrent_runs: Count | None = None
    queue: Queue | None = None
    timeout_seconds: Count = 0
    health: Health = Field(default_factory=Health)
    email_notifications: Email = Field(default_factory=Email)
    webhook_notifications: Webhooks = Field(default_factory=Webhooks)
    notification_settings: NotificationSettings = Field(default_factory=NotificationSettings)
    job_clusters: list[JobCluster] = Field(default_factory=list)
    environments: Any = noted(db.items(db.ENVIRONMENT), LIBRARIES)
    environment_variables: Any = noted(db.items(db.VARIABLES), LIBRARIES)
    git_source: Any = noted(db.GIT_SOURCE, LIBRARIES)
    permissions: Any = noted(db.items(db.PERMISSION), RIGHTS)
    run_as: Any = noted(db.RUN_AS, RIGHTS)
    lifecycle: Any = noted(db.LIFECYCLE, WORKSPACE)
    budget_policy_id: Any = noted(db.AnyText, WORKSPACE)
    usage_policy_id: Any = noted(db.AnyText, WORKSPACE)
    parent_path: Any = noted(db.AnyText, WORKSPACE)
    performance_target: Any = noted(db.AnyText, COMPUTE)
    duration_target: Any = noted(db.AnyText, COMPUTE)
    edit_mode: Any = noted(db.AnyText, WORKSPACE)
    format: Any = noted(db.AnyText, WORKSPACE)
    deployment: Any = noted(dict[str, Any], WORKSPACE)
    tasks: list[TaskFields]

    @property
    def is_continuous(self) -> bool:
        return self.continuous is not None or any(one.continuous is not None for one in self.triggers)

    @property
    def own_tasks(self) -> list[TaskFields]:
        """The tasks that run on this machine."""
        return [task for task in self.tasks if task.ours]

    @field_validator("tags")
    @classmethod
    def _can_be_tags(cls, tags: dict[str, str]) -> dict[str, str]:
        for text in (*tags, *filter(None, tags.values())):
            if not _TAG.fullmatch(text):
                raise refusal(f"'{text}' cannot be a tag", "use letters, digits, '_', '-' and '.', 63 at most")
        return tags

    @model_validator(mode="after")
    def _is_one_job(self) -> Self:
        triggers = [name for name in ("continuous", "schedule", "trigger", "triggers") if getattr(self, name)]
        if len(triggers) > 1:
            found = f"has both {' and '.join(triggers)}"
            raise refusal(found, "keep one; without any of them the job is started by hand")
        if len(self.triggers) > 1 and self.own_tasks:
            found = f"has {len(self.triggers)} triggers"
            raise refusal(found, "a job here has one: give each a job of its own", below="triggers")
        if self.own_tasks and self.max_concurrent_runs not in (None, 1):
            found = "max_concurrent_runs is not 1"
            raise refusal(found, "one driver per stream: leave it out, or write 1", below="max_concurrent_runs")
        return self

    @model_validator(mode="after")
    def _parameters_are_declared(self) -> Self:
        names = [parameter.name for parameter in self.parameters]
        for number, name in enumerate(names):
            if not _PARAMETER.fullmatch(name) or name in names[:number]:
                problem = f"'{name}' is not a new parameter name"
                raise refusal(problem, "use letters, digits and '_', each name once", below=f"parameters[{number}]")
        for number, task in enumerate(self.tasks):
            for text in task.python_wheel_task.arguments if task.ours and task.python_wheel_task else ():
                for reference in RUN_REFERENCE.finditer(text):
                    if (used := parameter_of(reference[1])) not in names:
                        raise refusal(
                            f"{{{{{reference[1]}}}}} names no parameter of the job",
                            f"declare '{used}' under parameters" if used else "write {{job.parameters.<name>}}",
                            below=f"tasks[{number}].python_wheel_task",
                        )
        return self

    @model_validator(mode="after")
    def _tasks_fit(self) -> Self:
        if not self.tasks:
            raise refusal("has 0 tasks", "write one", below="tasks")
        keys = [task.task_key for task in self.tasks]
        clusters = [cluster.job_cluster_key for cluster in self.job_clusters]
        environments = [environment.environment_key_ for environment in self.environments or []]
        for number, task in enumerate(self.tasks):
            here = f"tasks[{number}]"
            if task.task_key in keys[:number]:
                raise refusal(f"task {task.task_key} is there twice", "rename one of the two", below=here)
            for dependency in task.depends_on:
                others = [key for key in keys if key != task.task_key]
                _refuse_unknown("task", dependency.task_key, others, f"{here}.depends_on")
            if task.job_cluster_key:
                _refuse_unknown("job cluster", task.job_cluster_key, clusters, f"{here}.job_cluster_key")
            if task.environment_key:
                _refuse_unknown("environment", task.environment_key, environments, f"{here}.environment_key")
        waiting = {task.task_key: {d.task_key for d in task.depends_on} for task in self.tasks}
        while ready := [key for key, before in waiting.items() if not before & waiting.keys()]:
            for key in ready:
                del waiting[key]
        if waiting:
            raise refusal(f"depends_on: the tasks {', '.join(waiting)} wait for each other", below="tasks")
        return self

    @model_validator(mode="after")
    def _runs_one_session(self) -> Self:
        wheels = [task.python_wheel_task for task in self.own_tasks if task.python_wheel_task]
        sessions = [wheel for wheel in wheels if wheel.entry_point == ENTRY_POINT]
        if len(sessions) > 1:
            found = f"has {len(sessions)} tasks that run sessions"
            next_step = "streams of one session are named in one --streams; give another session a job of its own"
            raise refusal(found, next_step, below="tasks")
        if self.is_continuous and self.own_tasks:
            if len(self.tasks) != 1 or not sessions:
                found = "a continuous job here is one session, and no other task"
                raise refusal(found, "give the other tasks a job with a schedule", below="tasks")
            for retry in RETRIES:
                if retry in self.tasks[0].model_fields_set:
                    problem = "a continuous job has no task retries"
                    raise refusal(problem, "remove it; the job is restarted anyway", below=f"tasks[0].{retry}")
        return self


def _refuse_unknown(what: str, name: str, known: list[str], below: str) -> None:
    if name not in known:
        raise refusal(f"there is no {what} '{name}'", f"there are: {', '.join(known) or 'none'}", below=below)


class Presets(Fields):
    name_prefix: Text | None = None
    tags: dict[str, Text] = Field(default_factory=dict)
    trigger_pause_status: Pause | None = None
    jobs_max_concurrent_runs: Any = noted(db.AnyWhole, "one driver per stream: a job has one run at a time")
    pipelines_development: Any = noted(db.AnyFlag, WORKSPACE)
    source_linked_deployment: Any = noted(db.AnyFlag, WORKSPACE)
    artifacts_dynamic_version: Any = noted(db.AnyFlag, LIBRARIES)


class BundleFields(Fields):
    name: Text
    uuid: Any = noted(db.AnyText, WORKSPACE)
    cluster_id: Any = noted(db.AnyText, COMPUTE)
    compute_id: Any = noted(db.AnyText, COMPUTE)
    databricks_cli_version: Any = noted(db.AnyText, WORKSPACE)
    deployment: Any = noted(db.DEPLOYMENT, WORKSPACE)
    engine: Any = noted(db.AnyText, WORKSPACE)
    git: Any = noted(db.GIT, WORKSPACE)


class Variable(Fields):
    description: Text = ""
    default: Any = None
    type: Annotated[Literal["complex"] | None, Scalar] = None
    lookup: dict[db.LOOKUPS, db.AnyText] | None = None

    @model_validator(mode="after")
    def _has_its_type(self) -> Self:
        if isinstance(self.default, date):
            raise refusal(f"'{self.default}' is a date to YAML", "put it in quotes", below="default")
        if self.type is None and isinstance(self.default, (list, dict)):
            raise refusal("is a mapping or list", "write `type: complex` beside it", below="default")
        return self


_OTHER = "not a job: only Databricks has resources of this kind, and their contents are not checked here"


class Jobs(Fields):
    jobs: dict[str, JobFields] = Field(default_factory=dict)


_others: dict[str, Any] = {name: (Any, noted(dict[str, Any], _OTHER)) for name in db.OTHER_RESOURCES}
_RESOURCES = create_model("Resources", __base__=Jobs, **_others)


class Target(Fields):
    mode: Annotated[Literal["development", "production"] | None, Scalar] = None
    default: Flag = False
    variables: dict[str, Any] = Field(default_factory=dict)
    presets: Any = None
    resources: Any = None
    bundle: Any = None
    workspace: Any = None
    artifacts: Any = None
    git: Any = None
    permissions: Any = None
    run_as: Any = None
    sync: Any = None
    cluster_id: Any = None
    compute_id: Any = None


class Head(Fields):
    """A file of a bundle, before references are resolved: which fields there are, and what chooses the rest."""

    bundle: Any = None
    include: list[Text] = Field(default_factory=list)
    variables: dict[str, Variable] = Field(default_factory=dict)
    targets: dict[str, Target] = Field(default_factory=dict)
    resources: Any = None
    workspace: Any = None
    artifacts: Any = None
    permissions: Any = None
    presets: Any = None
    run_as: Any = None
    sync: Any = None
    python: Any = None
    experimental: Any = None
    scripts: Any = None


class Root(Fields):
    """A bundle for one target, resolved."""

    bundle: BundleFields
    presets: Presets = Field(default_factory=Presets)
    resources: Annotated[Jobs, Shape(_RESOURCES)] = Field(default_factory=Jobs)
    workspace: Any = noted(db.WORKSPACE_FIELDS, WORKSPACE)
    artifacts: Any = noted(db.entries(db.ARTIFACT), LIBRARIES)
    permissions: Any = noted(db.items(db.PERMISSION), RIGHTS)
    run_as: Any = noted(db.RUN_AS, RIGHTS)
    sync: Any = noted(db.SYNC, WORKSPACE)
    python: Any = noted(db.PYTHON, "resources that Python code makes are known to Databricks alone")
    experimental: Any = noted(db.EXPERIMENTAL, WORKSPACE)
    scripts: Any = noted(db.entries(db.SCRIPT), "`databricks bundle run` runs scripts")
