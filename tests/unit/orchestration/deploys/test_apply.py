"""What a deploy asks for, and what it makes of the answer."""

from __future__ import annotations

import time

from orchestration.deploys.plan import StreamDeploy
from orchestration.deploys.starting import request, wait_for_code
from streaming_jobs.state.requests import START
from streaming_jobs.state.status import Status, write_status
from tests.conftest import SettingsFactory

PLAN = StreamDeploy("orders", "deploy", "old", "new")


def test_a_request_that_waits_is_not_repeated_and_one_that_a_failed_start_has_seen_is(
    settings: SettingsFactory,
) -> None:
    home = settings()
    first = request(home, "orders", "anna", newest=0.0)
    assert request(home, "orders", "anna", newest=0.0) == first
    write_status(home, Status("orders", state="failed", started_at=first + 0.001))
    time.sleep(0.02)
    again = request(home, "orders", "anna", newest=0.0)
    pending = START.request(home, "orders")
    assert again > first and pending is not None and pending.since == again


def test_a_start_that_preflight_refuses_is_the_answer(settings: SettingsFactory) -> None:
    home = settings()
    asked = request(home, "orders", "anna", newest=0.0)
    error = {"code": "REC-021", "found": "another writer", "next": "accept it", "permanent": True}
    write_status(home, Status("orders", state="failed", started_at=asked + 1, error=error))  # type: ignore[arg-type]
    (done,) = wait_for_code(home, [PLAN], {"orders": asked}, 3600.0, lambda _: None)
    assert done.result == "failed" and "another writer" in done.text and "accept it" in done.text
