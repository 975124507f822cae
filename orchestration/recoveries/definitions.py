"""The job `recover`: plan, apply, resume, undo and abort recoveries from the Launchpad.

(No postponed annotations here: Dagster looks at the type of a step's `context`.)
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import dagster as dg
import yaml

from orchestration.bundle.job import Bundle
from orchestration.recoveries.request import CHOICES, TARGETS, not_given
from orchestration.sessions.ownership import RECOVERY_KIND, job_tags
from streaming_jobs.settings import Settings

LOCATION = "streams"
"""Name of the code location, a part of the addresses in the UI."""
JOB, STEP = "recover", "recovery"
"""The job, and its only step: Dagster wants two names."""
DESCRIPTION = """Puts streams right after a bug, in the Launchpad:

- `do: plan` with `streams` and a `target` shows what would happen; nothing is changed. Start here.
- `do: apply` with the `plan`'s id rebuilds the rows beside the published ones, checks and publishes them. A plan that
  was cut off is continued. With `pause_before_publishing: true` it ends when the rows have been compared; the next
  `do: apply` publishes them.
- `do: resume` continues a plan; `do: abort` gives it up before it has published; `do: undo` takes a published one back.

Terminating the run is safe: readers see the old rows, and the plan can be continued or given up."""


_ACTIONS = {
    "plan": "make a plan and show it; nothing else is changed",
    "apply": "carry a plan out; one that was cut off is continued",
    "plan_and_apply": "make a plan and carry it out at once; needs confirm",
    "resume": "continue a plan with the first stage that is not done",
    "undo": "restore the rows from before a published plan",
    "abort": "give a plan up before it has published",
}
_TYPES: dict[Any, Any] = {bool: dg.Bool, int: dg.Int, str: dg.String, list[str]: [str]}


def definitions(
    settings: Settings,
    tables: Mapping[str, Sequence[dg.AssetKey]],
    bundle: Bundle,
    command: Callable[[], list[str]] | None = None,
) -> dg.Definitions:
    """The job for these streams, with the assets of their tables; none without streams.

    Raises ConfigurationError if one of the bundle's jobs has its name.
    """
    bundle.refuse([JOB, STEP], "the recoveries' job")
    streams = list(tables)
    if not streams:
        return dg.Definitions()

    @dg.op(name=STEP, config_schema=schema(streams), out=dg.Out(dg.Nothing), description=DESCRIPTION)
    def recover(context: dg.OpExecutionContext) -> None:
        from orchestration.recoveries.run import RecoverySpec, run_recovery

        spec = RecoverySpec(settings, tables) if command is None else RecoverySpec(settings, tables, command)
        run_recovery(context, spec)

    @dg.job(
        name=JOB,
        description=DESCRIPTION,
        config=example(streams),
        tags=job_tags(settings, RECOVERY_KIND),
    )
    def job() -> None:
        recover()

    return dg.Definitions(jobs=[job])


def schema(streams: Sequence[str]) -> dict[str, Any]:
    """The fields, as Dagster checks them; `streams` are the names that can be given."""
    # Dagster remembers an enumeration by its name, also when another code location of this process has other values.
    mark = hashlib.sha256("\n".join(streams).encode()).hexdigest()[:8]
    name = dg.Enum(f"Stream_{mark}", [dg.EnumValue(stream) for stream in streams])
    action = dg.Enum("RecoveryAction", [dg.EnumValue(act, description=text) for act, text in _ACTIONS.items()])
    target: Any = dg.Selector(  # type: ignore[no-untyped-call]
        {name: dg.Field(_TYPES[option.type], description=option.description) for name, option in TARGETS.items()}
    )
    choices = {
        option.name: dg.Field(
            # Any: the Launchpad reads 0.05 as a number
            [name] if option.streams else dg.Any if option.name == "max_changed" else _TYPES[option.type],
            default_value=not_given(option),
            description=option.description,
        )
        for option in CHOICES.values()
    }
    return {
        "do": dg.Field(action, default_value="plan", description="what to do; plan changes nothing"),
        "plan": dg.Field(dg.String, default_value="", description="id of a plan; not with do: plan"),
        "streams": dg.Field([name], default_value=[], description="the streams to put right, in this order"),
        "target": dg.Field(target, is_required=False, description="where to go back to: exactly one of these"),
        **choices,
        "pause_before_publishing": dg.Field(
            dg.Bool,
            default_value=False,
            description="stop when the rebuilt rows have been compared; do: apply publishes them then",
        ),
        "confirm": dg.Field(
            dg.String, default_value="", description="only with do: plan_and_apply: the names of the streams, again"
        ),
    }


def example(streams: Sequence[str]) -> dict[str, Any]:
    """The configuration that the Launchpad opens with; launched as it is, it only makes a plan."""
    target = {"by_duration": "1 hour"}
    rest = {"require": [], "max_changed": "", "suites": True, "same_code": False, "discard_state": False}
    return run_config({"do": "plan", "plan": "", "streams": list(streams[:1]), "target": target, **rest})


def run_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"ops": {STEP: {"config": dict(fields)}}}


def location_of(run: dg.DagsterRun) -> str:
    """The name of the run's code location in the UI's addresses."""
    origin = run.remote_job_origin
    return origin.repository_origin.code_location_origin.location_name if origin is not None else LOCATION


def link(location: str, fields: Mapping[str, Any]) -> str:
    """The path of the Launchpad's page in the UI, filled in with these fields."""
    text = yaml.safe_dump(run_config(fields), sort_keys=False)
    return f"/locations/{quote(location)}/jobs/{JOB}/playground/setup?config={quote(text)}"


def link_to_plan(location: str, stream: str, broken: str) -> str:
    """The path of the Launchpad's page, filled in to plan a recovery from before the first row that breaks a rule."""
    return link(location, {"do": "plan", "streams": [stream], "target": {"before_first_broken": broken}})
