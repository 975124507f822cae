"""What Dagster's processes are told by the command that starts them."""

from __future__ import annotations

import pytest

from orchestration.local_dagster.processes import DagsterProcesses
from tests.conftest import SettingsFactory


@pytest.mark.parametrize(
    ("named", "told"), [({}, "http://127.0.0.1:3000"), ({"quality.ui_url": "https://streams.example.com"}, None)]
)
def test_alerts_link_to_the_ui_that_is_started_unless_another_one_is_named(
    settings: SettingsFactory, named: dict[str, str], told: str | None
) -> None:
    processes = DagsterProcesses(settings(named), url="http://127.0.0.1:3000")
    assert processes._environment().get("RECOURSE_QUALITY__UI_URL") == told
