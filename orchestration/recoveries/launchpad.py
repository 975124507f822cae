"""The Launchpad of the job `recover`: its fields, the launch that they describe, and links that fill them in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import dagster as dg
import yaml

from orchestration.recoveries.request import CHOICES, TARGETS, Action, Launch, Option, PlanRequest
from orchestration.sessions.names import named
from streaming_jobs.errors import UsageError
from streaming_jobs.settings import Settings

LOCATION = "streams"
"""Name of the code location, a part of the addresses in the UI."""
JOB, STEP = "recover", "recovery"
"""The job, and its only step: Dagster wants two names."""
PLANNING = ("plan", "plan_and_apply")
"""Actions that make a plan from a target; the others name a plan."""
_ACTIONS = {
    "plan": "make a plan and show it; nothing else is changed",
    "apply": "carry a plan out; one that was cut off is continued",
    "plan_and_apply": "make a plan and carry it out at once; needs confirm",
    "resume": "continue a plan with the first stage that is not done",
    "undo": "restore the rows from before a published plan",
    "abort": "give a plan up before it has published",
}
_TYPES: dict[Any, Any] = {bool: dg.Bool, int: dg.Int, str: dg.String, list[str]: [str]}


def launch_of(config: Mapping[str, Any]) -> Launch:
    """The launch that a run's configuration describes.

    Dagster has checked the fields' types. Raises UsageError for fields that do not go together.
    """
    do: Action = config["do"]
    plan, pause, confirm = config["plan"], config["pause_before_publishing"], config["confirm"]
    stop_first = config["stop_first"]
    for name, chosen in (("pause_before_publishing", pause), ("stop_first", stop_first)):
        if chosen and do in ("plan", "abort"):
            raise UsageError(f"do: {do} publishes nothing", f"leave {name} out")
    if confirm and do != "plan_and_apply":
        raise UsageError(f"confirm goes with do: plan_and_apply, not with do: {do}", "leave it out")
    if do not in PLANNING:
        _refuse(config, do, plan)
        return Launch(do, plan, pause=pause, stop_first=stop_first)
    if plan:
        raise UsageError(
            f"do: {do} makes a new plan, and plan: {plan} names one",
            f"to carry that one out, give only do: apply and plan: {plan}; for a new one, leave plan out",
        )
    request = _request(config)
    if do == "plan_and_apply":
        _refuse_unconfirmed(request, confirm)
    return Launch(do, request=request, pause=pause, stop_first=stop_first)


def _refuse(config: Mapping[str, Any], do: Action, plan: str) -> None:
    if not plan:
        raise UsageError(f"do: {do} needs a plan's id", "give it as plan: ...; do: plan makes one")
    defaults = {"streams": [], "target": None, **{name: not_given(option) for name, option in CHOICES.items()}}
    given = [name for name, default in defaults.items() if config.get(name) not in (default, None)]
    if given:
        raise UsageError(
            f"{', '.join(given)} can no longer be changed: plan {plan} has its own",
            f"leave {'it' if len(given) == 1 else 'them'} out, or make a new plan with do: plan",
        )


def not_given(option: Option) -> Any:
    """The value of a Launchpad field that means "not given"."""
    return [] if option.type == list[str] else option.default if option.type is bool else ""


def _request(config: Mapping[str, Any]) -> PlanRequest:
    (name, value), *_ = (config.get("target") or {"": None}).items()
    if not name:
        raise UsageError(
            "no target was given", f"give one, such as by_duration: 2 hours; there are {', '.join(TARGETS)}"
        )
    if TARGETS[name].type is bool and value is not True:
        raise UsageError(f"{name}: {value} names no target", f"write {name}: true, or another target")
    return PlanRequest.of_options(config["streams"], {**config, name: value})


def _refuse_unconfirmed(request: PlanRequest, confirm: str) -> None:
    named = {name.strip() for name in confirm.split(",") if name.strip()}
    if named != set(request.streams):
        raise UsageError(
            "do: plan_and_apply publishes without a look at the plan, and was not confirmed",
            f"write confirm: {', '.join(request.streams) or 'STREAM'}; or make the plan first, with do: plan",
        )


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
        "streams": dg.Field([name], default_value=[], description="the streams to recover, in this order"),
        "target": dg.Field(target, is_required=False, description="where to go back to: exactly one of these"),
        **choices,
        "pause_before_publishing": dg.Field(
            dg.Bool,
            default_value=False,
            description="stop when the rebuilt rows have been compared; do: apply publishes them then",
        ),
        "stop_first": dg.Field(
            dg.Bool, default_value=False, description="stop the streams before their replay instead of after it"
        ),
        "confirm": dg.Field(
            dg.String, default_value="", description="only with do: plan_and_apply: the names of the streams, again"
        ),
    }


def example(streams: Sequence[str]) -> dict[str, Any]:
    """The fields that the Launchpad opens with; launched as they are, they only make a plan."""
    target = {"by_duration": "1 hour"}
    rest = {"require": [], "max_changed": "", "suites": True, "same_code": False, "discard_state": False}
    return {"do": "plan", "plan": "", "streams": list(streams[:1]), "target": target, **rest}


def location_of(run: dg.DagsterRun) -> str:
    """The name of the run's code location in the UI's addresses."""
    origin = run.remote_job_origin
    return origin.repository_origin.code_location_origin.location_name if origin is not None else LOCATION


@dataclass(frozen=True)
class Launchpad:
    """The Launchpad of the job `recover` in a code location: the names by which the UI and a run know it."""

    location: str = LOCATION
    job: str = JOB
    step: str = STEP

    @classmethod
    def of(cls, settings: Settings, run: dg.DagsterRun | None = None) -> Launchpad:
        """Of the code location of `run`."""
        location = LOCATION if run is None else location_of(run)
        return cls(location, named(settings.dagster, JOB), named(settings.dagster, STEP))

    def run_config(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"ops": {self.step: {"config": dict(fields)}}}

    def link(self, fields: Mapping[str, Any]) -> str:
        """The path of the page in the UI, filled in with these fields."""
        text = yaml.safe_dump(self.run_config(fields), sort_keys=False)
        return f"/locations/{quote(self.location)}/jobs/{self.job}/playground/setup?config={quote(text)}"

    def link_to_plan(self, stream: str, broken: str) -> str:
        """The path of the page, filled in to plan a recovery from before the first row that breaks a rule."""
        return self.link({"do": "plan", "streams": [stream], "target": {"before_first_broken": broken}})


LAUNCHPAD = Launchpad()
"""Of `recourse up`."""
