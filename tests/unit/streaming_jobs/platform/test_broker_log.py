"""The lines of its log that the error of a broker's start shows."""

from __future__ import annotations

import sys

import pytest

from streaming_jobs.errors import SetupError
from streaming_jobs.platform.broker import Broker, Running
from streaming_jobs.platform.files import private_folder
from tests.conftest import SettingsFactory


def test_a_failed_start_shows_lines_of_this_start_only(
    settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = settings()
    log = private_folder(here.logs) / "broker.log"
    log.write_text("the disk was full twenty minutes ago\n")
    script = f"open({str(log)!r}, 'a').write('the port is still bound\\n')"

    def launch(self: Broker) -> Running:
        self._running = self._spawn([sys.executable, "-c", script], dict[str, str](), 9)
        self._wait_until_ready(self._running)
        raise AssertionError

    private_folder(here.broker_dir)
    monkeypatch.setattr(Broker, "_launch", launch)
    with pytest.raises(SetupError) as raised:
        Broker(here).start()
    assert "the port is still bound" in str(raised.value)
    assert "twenty minutes ago" not in str(raised.value)
