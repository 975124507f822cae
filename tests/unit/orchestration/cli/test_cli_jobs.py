"""`recourse jobs`: what is wrong or unused in the job YAML, the jobs of a target, and how two targets differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from streaming_jobs.runtime import session_options
from streaming_jobs.settings import Settings
from streaming_jobs.settings_sections import StreamSettings
from tests.support.worlds import STREAM
from tests.unit.orchestration.cli.conftest import Run

BUNDLE = f"""
bundle: {{name: shop}}
variables: {{rate: {{default: 10}}}}
targets:
  dev: {{default: true}}
  prod: {{variables: {{rate: 20}}, resources: {{jobs: {{rows: {{timeout_seconds: 60}}}}}}}}
resources:
  jobs:
    rows:
      run_as: {{user_name: a}}
      schedule: {{quartz_cron_expression: '0 0 3 L * ?', timezone_id: UTC}}
      tasks:
        - task_key: session
          python_wheel_task:
            package_name: recourse-streams
            entry_point: recourse-session
            parameters: [--streams, {STREAM}, --set, "stream.max_offsets_per_trigger=${{var.rate}}"]
"""


@pytest.fixture
def bundle(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RECOURSE_FLOWS", '["tests.support.worlds"]')
    file = empty_folder / "databricks.yml"
    file.write_text(BUNDLE)
    return file


def test_a_good_bundle_has_notes_and_no_errors(bundle: Path, run: Run) -> None:
    code, data, said = run("jobs", "validate")
    assert (code, said) == (0, f"{bundle}: 0 errors, 1 note\n")
    assert data.startswith(f"note: {bundle}:10: resources.jobs.rows.run_as: means nothing here: ")
    assert run.json("jobs", "validate", "--target", "prod")["targets"] == ["prod"]


def test_every_error_is_printed_with_its_line_and_its_target(bundle: Path, run: Run) -> None:
    bundle.write_text(BUNDLE.replace("timeout_seconds: 60", "timeout_seconds: x").replace(STREAM, "row"))
    code, data, said = run("jobs", "validate")
    assert (code, said) == (1, f"{bundle}: 2 errors, 1 note\n")
    errors = [line for line in data.split("\n") if line.startswith("error: ")]
    assert errors == [
        f"error: {bundle}:9: resources.jobs.rows: no stream is named 'row' (target dev)",
        f"error: {bundle}:6: resources.jobs.rows.timeout_seconds: 'x' is not a whole number, 0 or more (target prod)",
    ]
    found = run.json("jobs", "validate", code=1)
    assert [error["targets"] for error in found["errors"]] == [["dev"], ["prod"]]


def test_a_file_of_another_place_is_checked_by_its_name(bundle: Path, run: Run) -> None:
    other = bundle.parent / "other.yml"
    other.write_text("bundle: {nam: x}")
    assert "did you mean 'name'?" in run.ended(1, "jobs", "validate", str(other)).out
    other.write_text("bundle: [")
    assert f"{other}:1: while parsing" in run.said("jobs", "validate", str(other))


def test_a_project_s_own_file_comes_before_a_bundle_that_is_not_for_recourse(bundle: Path, run: Run) -> None:
    own = bundle.with_name("recourse-jobs.yml")
    own.write_text(BUNDLE.replace("shop", "mine"))
    bundle.write_text("bundle: {name: theirs}\nnonsense: 1")
    assert run.json("jobs", "show")["name"] == "mine"


def test_the_jobs_of_a_target_are_shown_resolved(bundle: Path, run: Run) -> None:
    job = run.json("jobs", "show", "--target", "prod")["jobs"]["rows"]
    assert job["trigger"]["when"] == "Quartz: 0 0 3 L * ? (UTC)"
    assert "T03:00:00" in job["trigger"]["next"]
    assert (job["timeout_seconds"], job["streams"]) == (60, [STREAM])
    command = job["tasks"]["session"]["command"]
    assert command[-3:] == ["stream.max_offsets_per_trigger=20", "--trigger", "available-now"]
    assert "timeout_seconds  60" in run("jobs", "show", "--target", "prod").out
    assert "there is no 'test'" in run.said("jobs", "show", "--target", "test")


def test_what_two_targets_do_differently_is_printed(bundle: Path, run: Run) -> None:
    fields = run.json("jobs", "diff", "dev", "prod")
    differences = {field["field"]: (field["dev"], field["prod"]) for field in fields}
    assert differences.keys() == {"timeout_seconds", "tasks.session.command"}
    assert differences["timeout_seconds"] == (None, "60")
    code, data, said = run("jobs", "diff", "dev", "dev")
    assert (code, data, said) == (0, "", "dev and dev have the same jobs\n")


def test_a_target_can_set_every_setting_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also lists and mappings, which a session reads as JSON from `--set`."""
    values = {
        name: '{"a": 1}' if "dict" in str(field.annotation) else '["a"]' if "list" in str(field.annotation) else None
        for name, field in StreamSettings.model_fields.items()
    }
    defaults = StreamSettings().model_dump(mode="json")
    for name, text in values.items():
        value = text or str(defaults[name] if defaults[name] is not None else "1 hour")
        arguments = ["--streams", STREAM, "--set", f"streams.{STREAM}.{name}={value}"]
        flags = session_options.flags(session_options.parse(arguments))
        assert name in Settings.load(flags).streams[STREAM].model_fields_set
    flags = session_options.flags(session_options.parse(["--set", 'flows=["a.b"]']))
    assert Settings.load(flags).flows == ["a.b"]
    flags = session_options.flags(session_options.parse(["--set", 'spark.extra={"spark.speculation": "false"}']))
    assert Settings.load(flags).spark.extra == {"spark.speculation": "false"}


def test_a_bundle_is_exported_and_its_files_are_printed(bundle: Path, run: Run) -> None:
    code, data, said = run("bundle", "export", "out", "--home", "/Volumes/a")
    assert (code, data) == (0, "out/databricks.yml\n")
    assert "no pyproject.toml above the bundle" in said
    assert "there is no such wheel" in run.said("bundle", "export", "out", "--wheel", "none.whl")
