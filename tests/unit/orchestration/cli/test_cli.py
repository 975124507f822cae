"""The rules that hold for every command: exit codes, where data and talk go, settings, what is not imported."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestration import cli
from orchestration.cli.options import Invocation, environment_name, parse_set, parse_value
from orchestration.recoveries import progress_text as recovery_words
from reprocessing.replay.difference import Difference
from streaming_jobs.errors import SetupError, UsageError
from tests.support import ROOT


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where tracebacks go
    for name in [name for name in os.environ if name.startswith("RECOURSE_") and name != "RECOURSE_DEMO"]:
        monkeypatch.delenv(name)


def recourse(*arguments: str, cwd: Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would, in its own process."""
    return subprocess.run(
        [sys.executable, "-m", "orchestration.cli", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in ("up", "doctor", "config", "streams", "feed"):
        assert f"  {command} " in text


def test_an_unknown_command_is_a_usage_error_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fly"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "No such command 'fly'" in printed.err


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("kafka.timeout=soon", "kafka.timeout (flag)"),
        ("nonsense=1", "nonsense (flag)"),
        ("justakey", "not key=value"),
        ("kafka..timeout=1", "not key=value"),
        ("flows=[1", "--set flows"),
    ],
)
def test_a_wrong_setting_is_a_usage_error_that_names_it(
    flag: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--set", flag, "config", "show"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert named in printed.err


def test_a_failure_prints_code_found_and_next_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SetupError("no Java here", "install Java 17")

    monkeypatch.setattr("streaming_jobs.settings.load", fail)
    assert cli.main(["config", "show"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "REC-003 no Java here\n  next: install Java 17\n"


def test_a_bug_of_ours_prints_one_line_and_keeps_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("the unexpected")

    monkeypatch.setattr("streaming_jobs.settings.load", fail)
    assert cli.main(["config", "show"]) == 3
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    written = Path(line.strip().rsplit(" ", 1)[1])
    text = written.read_text()
    written.unlink()
    assert "ZeroDivisionError: the unexpected" in text
    assert "in fail" in text


@pytest.mark.parametrize(("reason", "code"), [(errno.ENOSPC, 1), (errno.EACCES, 1), (errno.EBADF, 3)])
def test_a_full_disk_is_no_bug_of_ours(
    reason: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(reason, os.strerror(reason), "/data/state")

    monkeypatch.setattr("streaming_jobs.settings.load", fail)
    assert cli.main(["config", "show"]) == code
    message = capsys.readouterr().err
    assert ("/data/state" in message) == (code == 1)
    assert ("bug" in message) == (code == 3)


def test_an_interrupt_has_its_own_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("streaming_jobs.settings.load", interrupt)
    assert cli.main(["config", "show"]) == 130


def test_config_show_tells_value_and_origin_of_each_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recourse.toml").write_text('[stream]\ntrigger = "available-now"\n')
    monkeypatch.setenv("RECOURSE_STREAM__START", "latest")
    assert cli.main(["--set", "stream.lateness=6 hours", "config", "show", "stream.", "-o", "json"]) == 0
    shown = {row["key"]: (row["value"], row["origin"]) for row in json.loads(capsys.readouterr().out)}
    assert shown["stream.trigger"] == ("available-now", "file recourse.toml")
    assert shown["stream.start"] == ("latest", "environment")
    assert shown["stream.lateness"] == ("6 hours", "flag")
    assert shown["stream.committer"] == ("auto", "default")


def test_config_show_changed_leaves_defaults_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RECOURSE_DEMO")
    assert cli.main(["--set", "broker.heap_mb=96", "config", "show", "--changed", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"key": "broker.heap_mb", "value": "96", "origin": "flag"}]


@pytest.mark.parametrize("shape", ["text", "json"])
def test_config_show_hides_secrets(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--set", "kafka.sasl_password=hunter2", "config", "show", "-o", shape]) == 0
    printed = capsys.readouterr()
    assert "hunter2" not in printed.out + printed.err
    assert "(hidden)" in printed.out


def test_a_named_configuration_file_must_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--config", "missing.toml", "config", "show"]) == 2
    assert "missing.toml" in capsys.readouterr().err


def test_set_refuses_a_key_inside_another() -> None:
    with pytest.raises(UsageError, match=r"kafka\.timeout is a part of --set kafka"):
        parse_set(["kafka={}", "kafka.timeout=5 s"])


def test_set_reads_lists_as_json_and_all_else_as_text() -> None:
    assert parse_value("flows", '["a", "b"]') == ["a", "b"]
    assert parse_value("home", "a=b") == "a=b"


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


def test_the_real_command_separates_data_from_talk(tmp_path: Path) -> None:
    good = recourse("config", "show", "-o", "json", cwd=tmp_path)
    assert good.returncode == 0
    assert json.loads(good.stdout)
    assert good.stderr == ""
    bad = recourse("streams", "status", "nobody", cwd=tmp_path)
    assert bad.returncode == 2
    assert bad.stdout == ""
    assert "REC-001 no stream is named 'nobody'" in bad.stderr


def test_a_pipe_gets_whole_cells(tmp_path: Path) -> None:
    long = "x" * 300
    done = recourse("--set", f"target={long}", "config", "show", "target", cwd=tmp_path)
    assert long in done.stdout


@pytest.mark.parametrize("shape", ["text", "json"])
def test_a_reader_that_leaves_early_is_no_bug(shape: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "orchestration.cli", "config", "show", "-o", shape],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode in (0, 1)


@pytest.mark.parametrize("arguments", [["--help"], ["config", "show"], ["streams", "list"], ["streams", "status"]])
def test_light_commands_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from orchestration import cli\n"
        f"code = cli.main({arguments!r})\n"
        "heavy = {'dagster', 'pandas', 'pyarrow', 'deltalake', 'confluent_kafka', 'numpy'}\n"
        f"assert code == {int(arguments == ['streams', 'status'])}, code\n"  # nothing has ever run in this folder
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
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
    assert recovery_words.row_words(row) == words


def test_rows_of_one_side_begin_with_the_columns_that_differ() -> None:
    old = {"id": 1, "place": "a, b", "region": "x", "at": 5}
    other = {"id": 2, "place": "c", "region": "z", "at": 9}
    rows = [{"published": old}, {"rebuilt": other}, {"rebuilt": {**old, "region": "y"}}]
    sample = Difference("t", 2, 2, 1, 2, 0, {}, rows)
    lines = [line.strip() for line in recovery_words.difference_lines(sample)][1:]
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "column piecez cannot be resolved\n"
