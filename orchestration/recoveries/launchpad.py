"""The configuration of the job `recover` in the Launchpad: its fields, an example, and links that fill it in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import dagster as dg
import yaml

from orchestration.recoveries.launch import ACTIONS, OF_PLANNING

LOCATION = "streams"
"""Name of the code location, a part of the addresses in the UI."""

JOB, STEP = "recover", "recovery"
"""The job, and its only step: Dagster wants two names."""

_ACTION = dg.Enum(
    "RecoveryAction",
    [
        dg.EnumValue(name, description=text)
        for name, text in zip(
            ACTIONS,
            (
                "make a plan and show it; nothing else is changed",
                "carry a plan out; one that was cut off is continued",
                "make a plan and carry it out at once; needs confirm",
                "continue a plan with the first stage that is not done",
                "restore the rows from before a published plan",
                "give a plan up before it has published",
            ),
            strict=True,
        )
    ],
)


def _text(description: str) -> dg.Field:
    return dg.Field(dg.String, description=description)


def _number(description: str) -> dg.Field:
    return dg.Field(dg.Int, description=description)


_TARGET: Any = dg.Selector(  # type: ignore[no-untyped-call]
    {
        "to_earliest": dg.Field(dg.Bool, description="true: the first record that the topic still has"),
        "to_latest": dg.Field(dg.Bool, description="true: the topic's end; what is not read yet is skipped"),
        "to_offsets": _text("offsets by partition, in quotes: '0:120,1:98'"),
        "from_file": _text("a file on the machine of Dagster with lines topic,partition,offset"),
        "shift_by": _number("records in each partition from where the stream is; back is negative"),
        "by_duration": _text("that long before now, such as 2 hours"),
        "to_datetime": _text("an ISO time with its zone, such as 2026-11-21T08:00:00+00:00"),
        "to_batch": _number("the end of a batch; -1: before the first"),
        "to_table_version": _number("the batch that made this version of the primary table"),
        "savepoint": _text("the name of a savepoint"),
        "before_code": _text("before the first batch of a version of the code: its hash, in quotes"),
        "before_first_bad": _text("SQL: before the code that wrote the first row for which this holds"),
        "before_first_broken": _text(
            "a rule that has to hold for every row: SQL, or the name of a row rule or of a suite's expectation"
        ),
    }
)


def schema(streams: Sequence[str]) -> dict[str, Any]:
    """The fields, as Dagster checks them; `streams` are the names that can be given."""

    def flag(name: str, description: str) -> dg.Field:
        return dg.Field(dg.Bool, default_value=OF_PLANNING.get(name, False), description=description)

    # Dagster remembers an enumeration by its name, also when another code location of this process has other values.
    mark = hashlib.sha256("\n".join(streams).encode()).hexdigest()[:8]
    name = dg.Enum(f"Stream_{mark}", [dg.EnumValue(stream) for stream in streams])
    return {
        "do": dg.Field(_ACTION, default_value="plan", description="what to do; plan changes nothing"),
        "plan": dg.Field(dg.String, default_value="", description="id of a plan; not with do: plan"),
        "streams": dg.Field([name], default_value=[], description="the streams to put right, in this order"),
        "target": dg.Field(_TARGET, is_required=False, description="where to go back to: exactly one of these"),
        "until": dg.Field(
            dg.String,
            default_value="",
            description="correct only up to the end of this batch, such as batch 41; later rows stay as they are",
        ),
        "require": dg.Field([str], default_value=[], description="SQL that must hold for every rebuilt row"),
        "max_changed": dg.Field(
            dg.Any, default_value="", description="more rows than this share may not change, come or go: 5% or 0.05"
        ),
        "suites": flag("suites", "the streams' suites must pass on the rebuilt rows"),
        "allow_bad": flag("allow_bad", "with before_first_...: publish even if rebuilt rows are bad"),
        "exact": flag("exact", "with before_first_...: only before the row's own batch"),
        "same_code": flag("same_code", "replay with today's code although it is what wrote the bad rows"),
        "discard_state": flag("discard_state", "begin with empty state; the plan says what will be wrong"),
        "discard_state_of": dg.Field(
            [name], default_value=[], description="streams that go along with empty state; the plan says what is wrong"
        ),
        "rebuild": dg.Field([name], default_value=[], description="streams that go along and read everything anew"),
        "leave": dg.Field(
            [name],
            default_value=[],
            description="streams that do not go along: they keep what they made of the wrong records",
        ),
        "pause_before_publishing": flag(
            "pause", "stop when the rebuilt rows have been compared; do: apply publishes them then"
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
    """The configuration of a run with these fields."""
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
