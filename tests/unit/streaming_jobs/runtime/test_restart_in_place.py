"""A session that starts itself again in its own process: who started it sees it go on, with the code of now."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import LeaseBusy
from streaming_jobs.runtime import child_sessions
from streaming_jobs.runtime.code_watch import CodeWatch, versions
from streaming_jobs.settings import Settings
from streaming_jobs.state.lease import holder, take
from streaming_jobs.state.requests import STOP
from streaming_jobs.state.status import read_status
from tests.conftest import SettingsFactory
from tests.support import ROOT
from tests.support.waiting import wait_for
from tests.support.without_spark import FLOW, without_spark
from tests.support.worlds import parity, plain

pytestmark = pytest.mark.slow

SESSION = """
import os, signal, sys, threading, time
from streaming_jobs.runtime import child_sessions
from streaming_jobs.settings import Settings
from streaming_jobs.state.requests import STOP
stop = threading.Event()
print(os.getpid(), sys.argv[1:], flush=True)
if child_sessions.AGAIN in sys.argv:
    time.sleep(1)
for number in child_sessions.STOP_SIGNALS:
    signal.signal(number, lambda *_: stop.set())
child_sessions.take_signals(stop)
if child_sessions.AGAIN in sys.argv:
    stop.wait(3 if LATE else 20)
    print("asked to stop:", stop.is_set(), "input:", sys.stdin.readline(), flush=True)
    sys.exit(7)
if LATE:
    threading.Thread(target=os.read, args=(0, 1), daemon=True).start()
    replace = os.execv
    def late(*command):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        replace(*command)
    os.execv = late
child_sessions.start(stop)
"""


@pytest.mark.parametrize(
    ("late", "options", "written"), [(False, ["--streams", "a"], "still open\n"), (True, [], "")], ids=["early", "late"]
)
def test_the_same_process_starts_again_and_a_stop_in_between_is_not_lost(
    tmp_path: Path, *, late: bool, options: list[str], written: str
) -> None:
    """Neither one that arrives before the next session has a handler, nor one after the last look of the one before,
    whichever thread takes it."""
    script = tmp_path / "session.py"
    script.write_text(f"LATE = {late}\n{SESSION}")
    process = subprocess.Popen(
        [sys.executable, str(script), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == f"{process.pid} {options}\n"
        assert process.stdout.readline() == f"{process.pid} {[*options, '--again']}\n"
        if not late:
            process.send_signal(signal.SIGTERM)  # it is just starting, without a handler
        process.stdin.write(written)
        process.stdin.close()
        assert process.stdout.read() == f"asked to stop: True input: {written}\n"
        assert process.wait(30) == 7
    finally:
        process.kill()
        process.wait()


def test_a_session_that_starts_again_and_again_keeps_its_command_line() -> None:
    first = child_sessions.next_command(["python", "-m", "streaming_jobs.session", "--streams", "a"])
    assert first[-1] == child_sessions.AGAIN and child_sessions.next_command(first) == first


def test_streams_that_run_elsewhere_by_now_are_left_there(settings: SettingsFactory) -> None:
    home = settings()
    with take(home, "plain", purpose="session"):
        assert child_sessions.free(home, [plain, parity]) == [parity]
        with pytest.raises(LeaseBusy, match="runs elsewhere"):
            child_sessions.free(home, [plain])
    with take(home, "plain", purpose="recovery plan plain-1"):
        assert child_sessions.free(home, [plain, parity]) == [plain, parity]


def watching(flow: Path, home: Settings, *command: str) -> CodeWatch:
    """The watch over the code of a flow; without a `command`, another process of the session loads what is on disk."""
    loads = [sys.executable, "-m", "streaming_jobs.session", "--set", f"home={home.home}", "--print-versions"]
    return CodeWatch(command or loads, home, Topology.load(home.flows).select([]), flow.parent / "recourse.toml")


def verdict(watch: CodeWatch, *streams: str) -> bool:
    """The answer to the newest change, which another process gives."""
    wait_for(lambda: watch.newer(streams) or watch._loader is not None, "the look")
    while watch._loader is not None:
        if watch.newer(streams):
            return True
        time.sleep(0.05)
    return False


def test_other_code_is_noticed_for_its_stream_only_and_code_that_does_not_load_is_not_taken(
    flow: Path, settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECOURSE_FLOWS", json.dumps(["watched_flow"]))
    home = settings()
    watch, streams = watching(flow, home), Topology.load(home.flows).select([])
    try:
        assert not watch.newer(["watched"])
        flow.write_text(f"# a comment\n{FLOW}")
        assert not verdict(watch, "watched", "beside"), "a comment is no other code"
        flow.write_text(FLOW.replace('return t.select("n")', "return (", 1))
        assert not verdict(watch, "watched"), "it cannot be loaded"
        flow.write_text(FLOW.replace('return t.select("n")', 'return t.select("n", "n")', 1))
        assert not verdict(watch, "beside")
        flow.write_text(FLOW.replace('return t.select("n")', 'return t.select("n",  "n")', 1))
        assert verdict(watch, "watched")
        assert versions(home, streams)["stream watched"] == watch._running["stream watched"]
        assert watch.newer(["watched"]), "also if it was not acted on: somebody may have run it elsewhere meanwhile"
        assert not watch.newer(["beside"])
        flow.write_text(FLOW.replace('return t.select("n")', 'return t.select("n", "n")'))
        assert not verdict(watch), "neither of them has failed yet"
        assert watch.newer(["beside"]), "it fails later, and its file is as it was then"
        flow.write_text(FLOW.replace('return t.select("n")', "return ("))
        assert not verdict(watch, "watched", "beside"), "what was found before is not there any more"
        flow.write_text(FLOW)
        assert not verdict(watch, "watched", "beside"), "the code that runs"
    finally:
        watch.close()


def test_any_file_that_the_session_has_loaded_or_would_load_touches_it(
    flow: Path, settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one outside the packages that declare streams, and one that only Python's workers import."""
    monkeypatch.setenv("RECOURSE_FLOWS", json.dumps(["watched_flow"]))
    package, helper = flow.parent / "watched_flow", flow.parent / "helper_of_watched.py"
    package.mkdir()
    helper.write_text("FACTOR = 1")
    lazy = flow.parent / "lazy_of_watched.py"
    outside = flow.parent / "only_workers_import_this.py"
    outside.write_text("RATE = 1")
    lazy.write_text("def rate():\n    from only_workers_import_this import RATE\n    return RATE\n")
    flow.unlink()
    whole = FLOW.replace('return t.select("n")', "import lazy_of_watched", 1)
    whole = whole.replace('sink=DeltaTable("watched")', 'sink=DeltaTable("watched"), files=["rates.sql"]')
    rates = package / "rates.sql"
    rates.write_text("SELECT 1")
    (package / "__init__.py").write_text(f"import helper_of_watched\n{whole}")
    config = flow.parent / "recourse.toml"
    home = settings()
    watch = CodeWatch(["/nowhere"], home, Topology.load(home.flows).select([]), config)
    assert "lazy_of_watched" not in sys.modules
    for file in (helper, lazy, outside, rates, package / "__init__.py"):
        before, stat = file.read_text(), file.stat()
        assert watch.untouched()
        file.write_text(f"{before}\n")
        assert not watch.untouched(), file
        assert watch._seen() != watch._files, "a failed stream is looked at again"
        file.write_text(before)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    config.write_text("")
    assert not watch.untouched()
    sys.modules.pop("helper_of_watched")


@pytest.mark.parametrize(
    ("more", "taken"),
    [
        ('print("half a line", end=""); import atexit; atexit.register(print, "bye")', True),
        ("import os; os._exit(0)", False),
        ('import sys; print("[1]"); sys.stdout.flush(); import os; os.close(1)', False),
    ],
)
def test_what_the_code_prints_by_itself_ends_no_session(
    flow: Path, settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch, more: str, taken: bool
) -> None:
    monkeypatch.setenv("RECOURSE_FLOWS", json.dumps(["watched_flow"]))
    home = settings()
    watch = watching(flow, home)
    try:
        other = FLOW.replace('return t.select("n")', 'return t.select("n", "n")', 1)
        flow.write_text(f"{other}\n{more}\n")
        assert verdict(watch, "watched") == taken
    finally:
        watch.close()


def test_a_process_that_cannot_be_started_ends_no_session(
    flow: Path, settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECOURSE_FLOWS", json.dumps(["watched_flow"]))
    home = settings()
    watch = watching(flow, home, "/nowhere")
    monkeypatch.setattr("streaming_jobs.runtime.code_watch._LOOK_EVERY", 0)
    flow.write_text(f"# a comment\n{FLOW}")
    assert not watch.newer(["watched"])
    assert watch._seen() != watch._files, "it is asked again at the next look"


def test_a_stream_that_a_recovery_had_stopped_when_the_session_began_is_started_after_it(
    flow: Path, settings: SettingsFactory
) -> None:
    home = settings()
    STOP.ask_for(home, "watched", "watched-0001")
    process = without_spark(flow, home, "--respect-stop")
    try:
        wait_for(lambda: (s := read_status(home, "beside")) is not None and s.state == "running", "the session")
        assert read_status(home, "watched") is None
        STOP.clear_for(home, "watched", "watched-0001")
        wait_for(lambda: (s := read_status(home, "watched")) is not None and s.state == "running", "the other stream")
        assert holder(home, "watched") is not None
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
