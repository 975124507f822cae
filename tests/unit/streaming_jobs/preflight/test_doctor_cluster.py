"""The doctor proves a cluster's executors in a session of its own, and says what is wrong in one line."""

from __future__ import annotations

from typing import Any

import pytest

from streaming_jobs.errors import PermanentError, RecourseError, TransientError
from streaming_jobs.platform.cluster import Answer, Checked
from streaming_jobs.preflight.doctor import executor_checks
from tests.conftest import SettingsFactory

AWAY = {"spark.master": "spark://there:7077"}
ANSWER = Answer(
    host="a", folder="/w/1", python="3.11", versions={"pyspark": "4.2.0"}, java="21", clock=0, code="zip", files=[]
)


class Started:
    """A session in which executors are asked."""

    def __init__(self, refusal: RecourseError | None = None) -> None:
        self.refusal, self.calls = refusal, list[str]()

    def start(self, name: str) -> None:
        self.calls.append(name)
        if self.refusal is not None:
            raise self.refusal

    def stop(self) -> None:
        self.calls.append("stop")


@pytest.mark.parametrize("refusal", [None, TransientError("no executor for 60 s", "look at the master's page")])
def test_a_session_is_started_and_ended_and_each_host_is_named(
    settings: SettingsFactory, refusal: RecourseError | None
) -> None:
    session: Any = Started(refusal)
    checks = executor_checks(settings(AWAY), lambda _: session, lambda *_: Checked([ANSWER], ["the clock of a"]))
    assert session.calls == ["doctor", "stop"]
    if refusal is not None:
        assert [(c.ok, c.found, c.fix) for c in checks] == [(False, refusal.found, refusal.next_step)]
        return
    assert [c.ok for c in checks] == [True, None]
    assert checks[0].found.startswith("1 on a; Python 3.11, PySpark 4.2.0, Java 21; they read and write in ")
    assert checks[1].found == "the clock of a"


def test_an_executor_that_is_not_right_fails_and_a_local_master_has_none(settings: SettingsFactory) -> None:
    def refuse(*_: object) -> Checked:
        raise PermanentError("the executor on a has Python 3.9", "install another")

    session: Any = Started()
    (check,) = executor_checks(settings(AWAY), lambda _: session, refuse)
    assert (check.ok, check.found, session.calls) == (False, "the executor on a has Python 3.9", ["doctor", "stop"])
    (check,) = executor_checks(settings(), lambda _: session)
    assert check.ok is None and "driver is the only executor" in check.found
