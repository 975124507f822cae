"""The configuration of the job `recover`: what Dagster accepts, and the launch that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import dagster as dg
import pytest
import yaml

from orchestration.bundle.job import Bundle, Job, Task
from orchestration.recoveries.definitions import definitions
from orchestration.recoveries.launchpad import LAUNCHPAD, STEP, Launchpad, launch_of
from orchestration.recoveries.request import Launch, PlanRequest, share_of
from streaming_jobs.errors import ConfigurationError, UsageError
from streaming_jobs.settings import Settings

TO_BATCH = {"streams": ["orders"], "target": {"to_batch": 2}}


@pytest.fixture
def job(tmp_path: Path) -> dg.JobDefinition:
    tables = {name: [dg.AssetKey(name)] for name in ("orders", "customers")}
    return definitions(
        Settings.load({"home": tmp_path}), tables, Bundle("shop", "default", (), tmp_path)
    ).resolve_job_def("recover")


def checked(job: dg.JobDefinition, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields as the step gets them: checked by Dagster, with its defaults."""
    config: Mapping[str, Any] = dg.validate_run_config(job, LAUNCHPAD.run_config(fields))["ops"][STEP]["config"]
    return config


def test_launched_as_it_opens_it_only_makes_a_plan(job: dg.JobDefinition) -> None:
    assert job.run_config is not None
    launch = launch_of(checked(job, job.run_config["ops"][STEP]["config"]))
    assert launch == Launch("plan", request=PlanRequest(("orders",), {"duration": "1 hour"}))


@pytest.mark.parametrize(
    ("given", "kind", "value"),
    [
        ({"to_earliest": True}, "earliest", ""),
        ({"to_offsets": "0:120,1:98"}, "offsets", "0:120,1:98"),
        ({"shift_by": -1000}, "shift-by", "-1000"),
        ({"to_datetime": "2026-11-21T08:00:00+00:00"}, "datetime", "2026-11-21T08:00:00+00:00"),
        ({"to_batch": -1}, "batch", "-1"),
        ({"to_table_version": 0}, "table-version", "0"),
        ({"before_first_broken": "no_returns"}, "first-broken", "no_returns"),
    ],
)
def test_each_target_is_that_of_the_command_line(
    job: dg.JobDefinition, given: Mapping[str, Any], kind: str, value: str
) -> None:
    launch = launch_of(checked(job, {"streams": ["orders"], "target": given}))
    assert launch.request is not None and launch.request.target == (kind, value)


@pytest.mark.parametrize("share", ["5%", 0.05])
def test_a_share_may_be_a_number_or_a_text_as_the_launchpad_reads_it(job: dg.JobDefinition, share: object) -> None:
    launch = launch_of(checked(job, {"streams": ["orders"], "target": {"to_batch": 1}, "max_changed": share}))
    assert launch.request is not None and share_of(launch.request.max_changed) == 0.05


@pytest.mark.parametrize(
    "fields",
    [
        {"streams": ["oders"], "target": {"to_batch": 1}},
        {"streams": ["orders"], "target": {"to_batch": "one"}},
        {"streams": ["orders"], "target": {"to_batch": 1, "to_latest": True}},
        {"streams": ["orders"], "target": {}},
        {"streams": ["orders"], "target": {"to_offsets": 12}},
        {"do": "aply", "plan": "orders-0001"},
        {"do": "apply", "plan": 1},
        {"do": "apply", "paln": "orders-0001"},
    ],
)
def test_the_launchpad_refuses_what_has_the_wrong_type(job: dg.JobDefinition, fields: Mapping[str, Any]) -> None:
    with pytest.raises(dg.DagsterInvalidConfigError):
        checked(job, fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"streams": ["orders"]}, "no target was given"),
        ({"streams": ["orders"], "target": {"to_latest": False}}, "to_latest: False names no target"),
        ({"plan": "orders-0001", "streams": ["orders"], "target": {"to_batch": 1}}, "do: plan makes a new plan"),
        ({"do": "apply"}, "do: apply needs a plan's id"),
        ({"do": "apply", "plan": "orders-0001", "same_code": True}, "same_code can no longer be changed"),
        ({"do": "apply", "plan": "orders-0001", "until": "batch 5"}, "until can no longer be changed"),
        ({"do": "apply", "plan": "orders-0001", "leave": ["customers"]}, "leave can no longer be changed"),
        ({"do": "undo", "plan": "orders-0001", "target": {"to_batch": 1}}, "target can no longer be changed"),
        ({"do": "abort", "plan": "orders-0001", "pause_before_publishing": True}, "do: abort publishes nothing"),
        ({"do": "apply", "plan": "orders-0001", "confirm": "orders"}, "confirm goes with do: plan_and_apply"),
        ({**TO_BATCH, "do": "plan_and_apply"}, "was not confirmed"),
        ({**TO_BATCH, "do": "plan_and_apply", "confirm": "customers"}, "was not confirmed"),
    ],
)
def test_fields_that_do_not_go_together_are_refused_in_words(
    job: dg.JobDefinition, fields: Mapping[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        launch_of(checked(job, fields))
    assert refused.value.next_step


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        ({**TO_BATCH, "until": "batch 5"}, {"until": "batch 5"}),
        ({**TO_BATCH, "rebuild": ["customers"]}, {"rebuild": ("customers",), "leave": ()}),
        (
            {
                "do": "plan_and_apply",
                "streams": ["orders", "customers"],
                "target": {"by_duration": "2 hours"},
                "require": ["id > 0"],
                "suites": False,
                "confirm": "customers, orders",
                "pause_before_publishing": True,
            },
            {"streams": ("orders", "customers"), "require": ("id > 0",), "suites": False},
        ),
    ],
)
def test_a_launch_has_the_options_of_the_command_line_and_reaches_its_process_as_it_was(
    job: dg.JobDefinition, fields: Mapping[str, Any], chosen: Mapping[str, Any]
) -> None:
    launch = launch_of(checked(job, fields))
    assert launch.request is not None and chosen.items() <= vars(launch.request).items()
    assert launch.pause is fields.get("pause_before_publishing", False)
    assert Launch.decode(launch.encode()) == launch


def test_a_link_fills_the_launchpad_in_with_what_it_accepts(job: dg.JobDefinition) -> None:
    address = urlsplit(Launchpad("streams").link({"do": "resume", "plan": "orders-0001"}))
    assert address.path == "/locations/streams/jobs/recover/playground/setup"
    config = yaml.safe_load(parse_qs(address.query)["config"][0])
    assert launch_of(checked(job, config["ops"][STEP]["config"])) == Launch("resume", "orders-0001")


@pytest.mark.parametrize("name", ["recover", "recovery"])
def test_the_names_of_the_job_and_its_step_cannot_be_a_job_of_the_yaml(tmp_path: Path, name: str) -> None:
    named = Job(name, name, "", {}, (), None, 0, (Task("session", "", "", ()),), tmp_path)
    with pytest.raises(ConfigurationError, match=name):
        definitions(Settings.load({"home": tmp_path}), {"orders": []}, Bundle("shop", "default", (named,), tmp_path))
