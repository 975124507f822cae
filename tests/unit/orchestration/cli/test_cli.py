"""The rules that hold for every command: exit codes, where data and messages go, settings, what is not imported."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestration.cli.options import Invocation, parse_set
from orchestration.sessions.configuration import environment_name
from reprocessing.replay.difference import Difference
from reprocessing.replay.words import difference_lines, row_words
from streaming_jobs.errors import SetupError, UsageError
from streaming_jobs.settings import flag_value
from tests.support import ROOT
from tests.unit.orchestration.cli.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("empty_folder")]


def load_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Reading the settings fails with this error."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("streaming_jobs.settings.load", fail)


def python(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, as a user would."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )


RECOURSE = ("-m", "orchestration.cli")


def test_help_names_every_command(run: Run) -> None:
    code, text, _ = run("--help")
    assert code == 0
    for command in ("up", "init", "send", "doctor", "config", "streams", "feed"):
        assert f"  {command} " in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["fly"], "No such command 'fly'"),
        (["--set", "kafka.timeout=soon", "config", "show"], "kafka.timeout (flag)"),
        (["--set", "nonsense=1", "config", "show"], "nonsense (flag)"),
        (["--set", "justakey", "config", "show"], "not key=value"),
        (["--set", "kafka..timeout=1", "config", "show"], "not key=value"),
        (["--set", "flows=[1", "config", "show"], "--set flows"),
        (["--config", "missing.toml", "config", "show"], "missing.toml"),
    ],
)
def test_wrong_usage_is_named_on_stderr(run: Run, arguments: list[str], named: str) -> None:
    code, data, said = run(*arguments)
    assert (code, data) == (2, "") and named in said


def test_a_failure_prints_code_found_and_next_step(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    load_raises(monkeypatch, SetupError("no Java here", "install Java 17"))
    assert run("config", "show") == (1, "", "REC-003 no Java here\n  next: install Java 17\n")


def test_a_bug_of_ours_prints_one_line_and_keeps_the_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    load_raises(monkeypatch, ZeroDivisionError("the unexpected"))
    code, _, line = run("config", "show")
    assert (code, line.count("\n")) == (3, 1)
    text = Path(line.strip().rsplit(" ", 1)[1]).read_text()
    assert "ZeroDivisionError: the unexpected" in text and "in fail" in text


@pytest.mark.parametrize(("reason", "code"), [(errno.ENOSPC, 1), (errno.EACCES, 1), (errno.EBADF, 3)])
def test_a_full_disk_is_no_bug_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, reason: int, code: int
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    load_raises(monkeypatch, OSError(reason, os.strerror(reason), "/data/state"))
    ended, _, message = run("config", "show")
    assert ended == code
    assert ("/data/state" in message) == (code == 1)
    assert ("bug" in message) == (code == 3)


def test_an_interrupt_has_its_own_exit_code(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    load_raises(monkeypatch, KeyboardInterrupt())
    assert run("config", "show").code == 130


def test_config_show_tells_value_and_origin_of_each_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    (tmp_path / "recourse.toml").write_text('[stream]\ntrigger = "available-now"\n')
    monkeypatch.setenv("RECOURSE_STREAM__START", "latest")
    printed = run("--set", "stream.lateness=6 hours", "config", "show", "stream.", "-o", "json")
    shown = {row["key"]: (row["value"], row["origin"]) for row in printed.value}
    assert shown["stream.trigger"] == ("available-now", "file recourse.toml")
    assert shown["stream.start"] == ("latest", "environment")
    assert shown["stream.lateness"] == ("6 hours", "flag")
    assert shown["stream.committer"] == ("auto", "default")


def test_config_show_changed_leaves_defaults_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECOURSE_DEMO")
    printed = run("--set", "broker.heap_mb=96", "config", "show", "--changed", "-o", "json")
    assert printed.value == [{"key": "broker.heap_mb", "value": "96", "origin": "flag"}]


@pytest.mark.parametrize("shape", ["text", "json"])
def test_config_show_hides_secrets(shape: str, run: Run) -> None:
    code, data, said = run("--set", "kafka.sasl_password=hunter2", "config", "show", "-o", shape)
    assert code == 0 and "(hidden)" in data and "hunter2" not in data + said


def test_set_refuses_a_key_inside_another() -> None:
    with pytest.raises(UsageError, match=r"kafka\.timeout is a part of --set kafka"):
        parse_set(["kafka={}", "kafka.timeout=5 s"])


def test_set_reads_lists_as_json_and_all_else_as_text() -> None:
    assert flag_value("flows", '["a", "b"]') == ["a", "b"]
    assert flag_value("home", "a=b") == "a=b"


def test_a_child_gets_the_same_settings_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "streams.airport_hours.lateness": "3 days",
        "flows": '["streaming_jobs.examples.flights.streams"]',
        "home": "here",
    }
    call = Invocation(None, values)
    for name, text in call.environment().items():
        monkeypatch.setenv(name, text)
    monkeypatch.chdir("/")
    child = Invocation().settings
    assert child.streams == call.settings.streams
    assert child.flows == call.settings.flows
    assert child.home == tmp_path / "here"


def test_environment_names_follow_the_settings() -> None:
    assert environment_name("kafka.bootstrap_servers") == "RECOURSE_KAFKA__BOOTSTRAP_SERVERS"


def test_the_real_command_separates_data_from_messages() -> None:
    good = python(*RECOURSE, "config", "show", "-o", "json")
    assert good.returncode == 0
    assert json.loads(good.stdout)
    assert good.stderr == ""
    bad = python(*RECOURSE, "streams", "status", "nobody")
    assert bad.returncode == 2
    assert bad.stdout == ""
    assert "REC-001 no stream is named 'nobody'" in bad.stderr


def test_a_pipe_gets_whole_cells() -> None:
    long = "x" * 300
    assert long in python(*RECOURSE, "--set", f"target={long}", "config", "show", "target").stdout


@pytest.mark.parametrize("shape", ["text", "json"])
def test_a_reader_that_leaves_early_is_no_bug(shape: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = python(*RECOURSE, "config", "show", "-o", shape, stdout=writer)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode in (0, 1)


@pytest.mark.parametrize("arguments", [["--help"], ["config", "show"], ["streams", "list"], ["streams", "status"]])
def test_light_commands_import_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from orchestration import cli\n"
        f"code = cli.main({arguments!r})\n"
        "heavy = {'dagster', 'pandas', 'pyarrow', 'deltalake', 'confluent_kafka', 'numpy'}\n"
        f"assert code == {int(arguments == ['streams', 'status'])}, code\n"  # nothing has ever run in this folder
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    done = python("-c", script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"id": 1, "n published": 2, "n rebuilt": 3, "at published": 4, "at rebuilt": 4},
            "id 1: n 2 -> 3",
        ),
        ({"published": {"id": 1, "n": 2}}, "only published: id 1, n 2"),
        ({"rebuilt": {"id": 1}}, "only rebuilt: id 1"),
    ],
)
def test_a_row_that_differs_is_told_by_what_differs(row: dict[str, Any], words: str) -> None:
    assert row_words(row) == words


def test_rows_of_one_side_begin_with_the_columns_that_differ() -> None:
    old = {"id": 1, "place": "a, b", "region": "x", "at": 5}
    other = {"id": 2, "place": "c", "region": "z", "at": 9}
    rows = [{"published": old}, {"rebuilt": other}, {"rebuilt": {**old, "region": "y"}}]
    sample = Difference("t", 2, 2, 1, 2, 0, {}, rows)
    lines = [line.strip() for line in difference_lines(sample)][1:]
    assert lines[0] == "only published: region x, id 1, place a, b, at 5"
    assert lines[2] == "only rebuilt: region y, id 1, place a, b, at 5"


@pytest.mark.parametrize("logger", ["DataFrameQueryContextLogger", "SQLQueryContextLogger"])
def test_an_error_of_a_plan_is_told_without_the_traces_that_pyspark_logs(logger: str) -> None:
    code = (
        "from orchestration.cli.text import log_to_stderr, say\n"
        "from pyspark.logger import PySparkLogger\n"
        "log_to_stderr()\n"
        f"PySparkLogger.getLogger({logger!r}).exception('a trace', file='flows.py', line='7')\n"
        "say('column piecez cannot be resolved')\n"
    )
    done = python("-c", code)
    assert done.returncode == 0 and done.stderr == "column piecez cannot be resolved\n"
