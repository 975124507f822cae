"""Fixtures of the tests of a session: its home, and its entry point."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator

import pytest
import structlog

from streaming_jobs.runtime.child_sessions import STOP_SIGNALS
from streaming_jobs.session import Session, main
from streaming_jobs.settings import Settings
from tests.conftest import SettingsFactory
from tests.support.sessions import session_of


@pytest.fixture
def home(settings: SettingsFactory) -> Settings:
    return settings({"kafka.bootstrap_servers": "127.0.0.1:1"})


@pytest.fixture
def start(home: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs the entry point with options, on the streams of this test's home and without Spark."""
    monkeypatch.setenv("RECOURSE_FLOWS", '["tests.support.worlds"]')
    handlers, level = {number: signal.getsignal(number) for number in STOP_SIGNALS}, logging.getLogger("py4j").level

    def start(*options: str, make: Callable[..., Session] = session_of) -> int:
        places = (f"home={home.home}", f"kafka.bootstrap_servers={home.kafka.bootstrap_servers}")
        return main([*options, *(part for each in places for part in ("--set", each))], make)

    yield start
    structlog.reset_defaults()
    logging.getLogger("py4j").setLevel(level)
    for number, handler in handlers.items():
        signal.signal(number, handler)
