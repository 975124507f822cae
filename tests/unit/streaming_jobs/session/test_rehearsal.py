from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import structlog

from streaming_jobs.errors import BrokerUnreachable
from streaming_jobs.runtime.rehearsal import rehearse
from streaming_jobs.runtime.stream_queries import SparkQueries
from streaming_jobs.settings import Settings
from tests.support.worlds import parity


def test_a_rehearsal_that_fails_leaves_nothing_and_the_start_to_be_tried(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_broker(*_: object) -> None:
        raise BrokerUnreachable("the broker is away", "start it")

    monkeypatch.setattr(SparkQueries, "open", no_broker)
    stop = threading.Event()
    with structlog.testing.capture_logs() as logged:
        rehearse(home, [parity], cast("Any", None), stop)
        stop.set()
        rehearse(home, [parity], cast("Any", None), stop)
    (line,) = logged
    assert line["event"] == "the start of the stream was not rehearsed" and line["reason"] == "the broker is away"
    assert not [*home.home.glob("scratch/rehearsal-*/*/")]
