"""Fixtures: a home of its own with the fake streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streaming_jobs.settings import Settings
from tests.support import ROOT


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a home with the fake streams and their job, also in the environment."""
    monkeypatch.chdir(ROOT)
    values = {
        "RECOURSE_HOME": str(tmp_path),
        "RECOURSE_FLOWS": json.dumps(["tests.dagster.fakes.flows"]),
        "RECOURSE_JOBS": str(Path(__file__).parent / "fakes" / "databricks.yml"),
        "RECOURSE_DAGSTER__PORT": "0",
        "RECOURSE_DAGSTER__STALE_AFTER": "5 seconds",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return Settings.load()


def starts(settings: Settings) -> list[dict[str, Any]]:
    """Every start of the fake driver in this home: pid, arguments, run."""
    path = settings.home / "starts"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
