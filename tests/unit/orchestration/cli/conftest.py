"""The command line as a test types it: in an empty folder, with the streams that the test declares."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from orchestration import cli
from streaming_jobs.stream import Stream
from tests.support.life import Topics


class Printed(NamedTuple):
    """What a command did: its exit code, its data and its messages."""

    code: int
    out: str
    err: str

    @property
    def value(self) -> Any:
        return json.loads(self.out)


class Run:
    """Runs `recourse` with arguments."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Printed:
        self._capsys.readouterr()
        code = cli.main(list(arguments))
        return Printed(code, *self._capsys.readouterr())

    def ended(self, code: int, *arguments: str) -> Printed:
        """What a command printed that ends with this exit code."""
        printed = self(*arguments)
        assert printed.code == code, printed
        return printed

    def json(self, *arguments: str, code: int = 0) -> Any:
        return self.ended(code, *arguments, "-o", "json").value

    def said(self, *arguments: str, code: int = 2) -> str:
        """The messages of a command, as a rule of a refusal."""
        return self.ended(code, *arguments).err


Declare = Callable[..., None]


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; nothing in the environment configures the command."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("RECOURSE_") and name != "RECOURSE_DEMO"]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def declare(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Declare:
    """Declares streams; the current folder is the home, and the broker is the one of `tests.support.life`."""

    def declare(*streams: Stream) -> None:
        flows = ModuleType("declared_by_a_test")
        vars(flows).update({stream.name.upper(): stream for stream in streams})
        monkeypatch.setitem(sys.modules, flows.__name__, flows)
        monkeypatch.setenv("RECOURSE_HOME", str(empty_folder))
        monkeypatch.setenv("RECOURSE_FLOWS", json.dumps([flows.__name__]))
        monkeypatch.setenv("RECOURSE_KAFKA__BOOTSTRAP_SERVERS", "nowhere:1")
        monkeypatch.setattr("streaming_jobs.sources.topics.Topics.of", lambda *_: Topics())

    return declare


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)
