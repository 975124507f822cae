"""Fixtures: a home of its own with the fake streams, Dagster's instances, and a worker that looks often."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.storage.defs_state.base import set_defs_state_storage

from orchestration.sessions import child_run
from orchestration.sessions.ownership import PARENT_VARIABLE
from streaming_jobs.settings import Settings
from tests.support import ROOT
from tests.support.dagster_homes import stored_instance


@pytest.fixture(scope="module", autouse=True)
def no_instance_of_another_module() -> Iterator[None]:
    """Definitions are loaded with the storage of the instance that was entered last.

    If a context of Dagster entered an instance and never left it, the garbage collector does when it finds the context.
    Then the storage is again the one before, whose instance may be gone, and no definitions can be loaded.
    """
    gc.collect()
    with set_defs_state_storage(None):
        yield


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


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def stored(shop: Settings) -> Iterator[dg.DagsterInstance]:
    """An instance that another process can use too."""
    with stored_instance(shop) as instance:
        yield instance


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run looks often at its child and at its storage, and has no `recourse up` above it."""
    monkeypatch.setattr(child_run, "POLL", 0.1)
    monkeypatch.setattr(child_run, "LOOK_AT_RUN_EVERY", 0.2)
    monkeypatch.delenv(PARENT_VARIABLE, raising=False)


def starts(settings: Settings) -> list[dict[str, Any]]:
    """Every start of the fake driver in this home: pid, arguments, run."""
    path = settings.home / "starts"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
