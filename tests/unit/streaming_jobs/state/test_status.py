"""The status file: new ones have the form of now, and old ones are still read."""

from __future__ import annotations

import json

import pytest

from streaming_jobs.errors import PermanentError, RecourseError, TransientError, UsageError
from streaming_jobs.failures import report_of
from streaming_jobs.state.status import Status, read_status, write_status
from streaming_jobs.state.stream_folder import StreamFolder
from tests.conftest import SettingsFactory

ERROR = {"code": "REC-020", "found": "a table is gone", "next": "put it back"}
LAST = {**ERROR, "at": "2026-11-22T10:00:00+00:00"}


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False)])
def test_a_status_of_before_says_as_text_what_is_a_boolean_now(
    settings: SettingsFactory, text: str, value: bool
) -> None:
    home = settings()
    old = {
        "stream": "orders",
        "state": "failed",
        "error": {**ERROR, "permanent": text},
        "last_error": {**LAST, "permanent": text, "lasting": text},
    }
    StreamFolder.of(home, "orders").make().status.write_text(json.dumps(old))
    status = read_status(home, "orders")
    assert status is not None
    assert status.error == {**ERROR, "permanent": value}
    assert status.last_error == {**LAST, "permanent": value, "lasting": value}


@pytest.mark.parametrize(
    ("error", "permanent"),
    [(PermanentError("a", "b"), True), (UsageError("a", "b"), True), (TransientError("a", "b"), False)],
)
def test_whether_a_person_is_needed_is_a_boolean_in_the_file(
    settings: SettingsFactory, error: RecourseError, permanent: bool
) -> None:
    home, status = settings(), Status("orders")
    status.set_error({**report_of(error), "lasting": not permanent})
    write_status(home, status)
    written = json.loads(StreamFolder.of(home, "orders").status.read_text())
    for name in ("error", "last_error"):
        assert (written[name]["permanent"], written[name]["lasting"]) == (permanent, not permanent)
    assert read_status(home, "orders") == status


def test_a_status_without_an_error_has_none(settings: SettingsFactory) -> None:
    write_status(settings(), Status("orders"))
    status = read_status(settings(), "orders")
    assert status is not None and status.error is None and status.last_error is None
