"""The gates of `recourse deploy`: with --yes, a gate without a verdict refuses the deploy."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestration import cli
from orchestration.deploys import rebuild
from orchestration.deploys.rebuild import Rebuild
from streaming_jobs.runtime import trial
from streaming_jobs.runtime.trial import TrialVerdict
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_history, stream_record
from streaming_jobs.state.lease import acquire
from streaming_jobs.state.requests import START
from streaming_jobs.state.status import Status, write_status
from tests.support.without_spark import FLOW

STREAM = "watched"
OLD = "2-0123456789ab (1.0)"
Previewed = list[int]
OTHER_STATE = TrialVerdict(
    f"the state of stream {STREAM} was built by another aggregation: new: max(n)",
    "rebuild it",
    "state has to be rebuilt",
    "new: max(n)",
    ("column m is new",),
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A home with the code of the stream `watched`, which has run with other code and been stopped."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gated_flow.py").write_text(FLOW)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RECOURSE_FLOWS", '["gated_flow"]')
    monkeypatch.setenv("RECOURSE_HOME", str(tmp_path / "home"))
    settings = Settings.load()
    write_status(settings, Status(STREAM, "stopped", code_version=OLD))
    return settings


@pytest.fixture
def runs(home: Settings) -> Iterator[Settings]:
    """The same home; this process runs the stream."""
    lease = acquire(home, STREAM, purpose="session")
    now = time.time()
    status = Status(STREAM, "running", os.getpid(), heartbeat=now, started_at=now, begun_at=now, code_version=OLD)
    write_status(home, status)
    yield home
    lease.release()


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Previewed:
    """The exit code of each preview, which is not run."""
    codes = [0]
    done = subprocess.CompletedProcess[bytes]
    monkeypatch.setattr(subprocess, "run", lambda command, **_: done(command, codes[0]))
    return codes


def deploy(*arguments: str) -> int:
    return cli.main(["deploy", STREAM, "--timeout", "0", *arguments])


def was_deployed(settings: Settings) -> bool:
    asked = START.request(settings, STREAM) is not None
    assert asked == bool(stream_history.deploys(settings, STREAM))
    return asked


@pytest.mark.parametrize(
    ("arguments", "code", "goes_on"),
    [
        (["--preview"], 0, True),
        (["--preview"], 10, True),
        (["--preview"], 1, False),
        (["--preview"], 2, False),
        (["--preview"], -9, False),
        (["--require", "not-broken"], 10, True),
        (["--require", "not-broken"], 1, False),
        (["--require", "equal"], 0, True),
        (["--require", "equal"], 10, False),
        ([], 1, True),
    ],
)
def test_a_preview_that_does_not_pass_refuses_the_deploy(
    runs: Settings, ending: Previewed, arguments: list[str], code: int, goes_on: bool
) -> None:
    ending[0] = code
    deploy("--yes", "--no-trial", *arguments)
    assert was_deployed(runs) is goes_on


def test_a_required_preview_holds_without_yes_too(
    runs: Settings, ending: Previewed, capsys: pytest.CaptureFixture[str]
) -> None:
    ending[0] = 1
    assert deploy("--dry-run", "--no-trial", "--require", "not-broken", "-o", "json") == 1
    assert json.loads(capsys.readouterr().out)["refused"] == [STREAM]


@pytest.mark.parametrize(("trial_is", "goes_on"), [("silent", False), ("well", True), ("refused", False)])
def test_a_trial_without_a_verdict_refuses_the_deploy(
    runs: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trial_is: str,
    goes_on: bool,
) -> None:
    verdicts = {"silent": None, "well": {STREAM: TrialVerdict()}, "refused": {STREAM: TrialVerdict("a bug", "mend it")}}
    monkeypatch.setattr(trial, "tried", lambda *_: verdicts[trial_is])
    deploy("--yes")
    assert was_deployed(runs) is goes_on
    assert ("no verdict" in capsys.readouterr().out) is (trial_is == "silent")


@pytest.mark.parametrize("keeps_state", [False, True])
def test_without_a_verdict_a_stream_that_keeps_state_is_not_stopped_even_if_a_person_answers(
    runs: Settings, monkeypatch: pytest.MonkeyPatch, keeps_state: bool
) -> None:
    state = {"0": "Aggregate [n], [n]"} if keeps_state else {}
    stream_record.save(runs, replace(stream_record.first(STREAM), state_fingerprint=state))
    monkeypatch.setattr(trial, "tried", lambda *_: None)
    assert deploy("--dry-run") == (1 if keeps_state else 0)


def test_a_change_that_the_state_cannot_take_is_refused_before_the_stop_with_the_recovery_and_its_cost(
    runs: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trial, "tried", lambda *_: {STREAM: OTHER_STATE})
    monkeypatch.setattr(rebuild, "rebuild_of", lambda *_: Rebuild(("rebuild the state: recourse recover plan",)))
    assert deploy("--yes") == 1 and not was_deployed(runs)
    shown = capsys.readouterr()
    for words in ("state has to be rebuilt (new: max(n))", "column m is new", "recourse recover plan", "REFUSED"):
        assert words in shown.out
    assert f"recourse deploy {STREAM} --rebuild" in shown.err


@pytest.mark.parametrize(
    ("verdict", "lost", "arguments", "action"),
    [
        (OTHER_STATE, "", (), "rebuild"),
        (OTHER_STATE, "offsets 0 to 24 are gone", (), "deploy"),
        (OTHER_STATE, "offsets 0 to 24 are gone", ("--discard-state",), "rebuild"),
        (replace(OTHER_STATE, found="column m has another type"), "", (), "deploy"),
    ],
)
def test_state_is_rebuilt_if_it_alone_refuses_the_code_and_without_records_that_are_gone_only_on_request(
    runs: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verdict: TrialVerdict,
    lost: str,
    arguments: tuple[str, ...],
    action: str,
) -> None:
    monkeypatch.setattr(trial, "tried", lambda *_: {STREAM: verdict})
    monkeypatch.setattr(rebuild, "rebuild_of", lambda *_: Rebuild(("rebuild the state",), lost))
    code = deploy("--dry-run", "--rebuild", *arguments, "-o", "json")
    document = json.loads(capsys.readouterr().out)
    (stream,) = document["streams"]
    assert (stream["action"], code) == (action, 0 if action == "rebuild" else 1)
    assert (document["rebuilt"], document["touched"]) == (([STREAM], []) if action == "rebuild" else ([], [STREAM]))
    assert "--discard-state" in str(stream["refused"]) or not (lost and action == "deploy")
    assert not was_deployed(runs)


def test_a_stream_that_does_not_run_is_recorded_where_its_next_start_needs_that(
    home: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert deploy("--yes", "--no-trial") == 0
    assert "nothing to deploy" in capsys.readouterr().out and not stream_history.deploys(home, STREAM)
    monkeypatch.setenv("RECOURSE_STREAM__REQUIRE_DEPLOY", "true")
    assert deploy("--yes", "--no-trial") == 0
    assert [each.before for each in stream_history.deploys(home, STREAM)] == ["2-0123456789ab"]
    assert START.request(home, STREAM) is None and "its next start may run it" in capsys.readouterr().out
