"""What a run of the job `recover` is launched to do: read from its configuration, passed to its process as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from orchestration.recoveries.plan_request import TARGETS, PlanRequest
from streaming_jobs.errors import UsageError

Action = Literal["plan", "apply", "plan_and_apply", "resume", "undo", "abort"]
ACTIONS: tuple[Action, ...] = get_args(Action)
PLANNING = ("plan", "plan_and_apply")
"""Actions that make a plan from a target; the others name a plan."""
ALONG = ("discard_state_of", "rebuild", "leave")
"""The fields that name streams which the plan takes along."""
OF_PLANNING: Mapping[str, Any] = {
    "streams": [],
    "target": None,
    "require": [],
    "max_changed": "",
    "suites": True,
    "allow_bad": False,
    "exact": False,
    "same_code": False,
    "discard_state": False,
    "until": "",
    **{name: [] for name in ALONG},
}
"""The fields that describe a new plan, with the values that stand for "not given"."""
_FLAGS = ("to_earliest", "to_latest")
"""Targets without a value."""


@dataclass(frozen=True)
class Launch:
    """One action on a plan, or the request for a new one. With `pause` it stops before anything is published."""

    do: Action
    plan: str = ""
    request: PlanRequest | None = None
    pause: bool = False

    def encode(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Launch:
        """The launch from its JSON; raises ValueError for anything else."""
        value = json.loads(text)
        request = value.pop("request")
        if request is not None:
            request |= {name: tuple(request[name]) for name in ("streams", "require", *ALONG)}
        return cls(**value, request=None if request is None else PlanRequest(**request))


def launch_of(config: Mapping[str, Any]) -> Launch:
    """The launch that a run's configuration describes.

    Dagster has checked the fields' types. Raises UsageError for fields that do not go together.
    """
    do: Action = config["do"]
    plan, pause, confirm = config["plan"], config["pause_before_publishing"], config["confirm"]
    if pause and do in ("plan", "abort"):
        raise UsageError(f"do: {do} publishes nothing", "leave pause_before_publishing out")
    if confirm and do != "plan_and_apply":
        raise UsageError(f"confirm goes with do: plan_and_apply, not with do: {do}", "leave it out")
    if do not in PLANNING:
        _refuse(config, do, plan)
        return Launch(do, plan, pause=pause)
    if plan:
        raise UsageError(
            f"do: {do} makes a new plan, and plan: {plan} names one",
            f"to carry that one out, give only do: apply and plan: {plan}; for a new one, leave plan out",
        )
    request = _request(config)
    if do == "plan_and_apply":
        _refuse_unconfirmed(request, confirm)
    return Launch(do, request=request, pause=pause)


def _refuse(config: Mapping[str, Any], do: Action, plan: str) -> None:
    if not plan:
        raise UsageError(f"do: {do} needs a plan's id", "give it as plan: ...; do: plan makes one")
    given = [name for name, default in OF_PLANNING.items() if config.get(name) not in (default, None)]
    if given:
        raise UsageError(
            f"{', '.join(given)} cannot be changed any more: plan {plan} has its own",
            f"leave {'it' if len(given) == 1 else 'them'} out, or make a new plan with do: plan",
        )


def _request(config: Mapping[str, Any]) -> PlanRequest:
    (option, value), *_ = (config.get("target") or {"": None}).items()
    if not option:
        raise UsageError(
            "no target was given", f"give one, such as by_duration: 2 hours; there are {', '.join(names())}"
        )
    if option in _FLAGS and value is not True:
        raise UsageError(f"{option}: {value} names no target", f"write {option}: true, or another target")
    share = config["max_changed"]
    return PlanRequest(
        streams=tuple(config["streams"]),
        targets={TARGETS[option.replace("_", "-")]: "" if option in _FLAGS else str(value)},
        require=tuple(config["require"]),
        max_changed=None if share in ("", None) else str(share),
        until=config["until"] or None,
        discard_state_of=tuple(config["discard_state_of"]),
        rebuild=tuple(config["rebuild"]),
        leave=tuple(config["leave"]),
        **{name: config[name] for name in ("suites", "allow_bad", "exact", "same_code", "discard_state")},
    )


def _refuse_unconfirmed(request: PlanRequest, confirm: str) -> None:
    named = {name.strip() for name in confirm.split(",") if name.strip()}
    if named != set(request.streams):
        raise UsageError(
            "do: plan_and_apply publishes without a look at the plan, and was not confirmed",
            f"write confirm: {', '.join(request.streams) or 'STREAM'}; or make the plan first, with do: plan",
        )


def names() -> list[str]:
    """The names of the targets, as the configuration has them."""
    return [option.replace("-", "_") for option in TARGETS]
