"""Dagster's real processes over a home, as `recourse up` runs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import dagster as dg

from orchestration.local_dagster.dagster_home import LOCATION
from orchestration.local_dagster.processes import DagsterProcesses
from streaming_jobs.settings import Settings
from tests.support.dagster_runs import REPOSITORY, RunsClient
from tests.support.waiting import PATIENCE

T = TypeVar("T")


@dataclass
class LiveDagster:
    """A running Dagster, whose sensors are quick (`fakes/quick.py`)."""

    settings: Settings
    processes: DagsterProcesses

    @property
    def client(self) -> RunsClient:
        return RunsClient(self.processes.url)

    def wait_for(self, condition: Callable[[], T], what: str) -> T:
        """Wait, looking after the processes meanwhile as `recourse up` does."""
        deadline = time.monotonic() + PATIENCE
        while not (value := condition()):
            assert time.monotonic() < deadline, f"waited {PATIENCE:.0f} s for {what}: {self.state()}"
            self.processes.supervise()
            time.sleep(0.3)
        return value

    def state(self) -> object:
        """What a test that waited in vain says."""
        return ""

    def stored(self) -> dg.DagsterInstance:
        return dg.DagsterInstance.from_config(str(self.settings.dagster_home))

    def skips(self, sensor: str, since: float = 0.0) -> list[str]:
        """The reasons of a sensor's newest skipped ticks, from a time on."""
        answer = self.client.query(
            """query($sensor: SensorSelector!) { sensorOrError(sensorSelector: $sensor) {
            ... on Sensor { sensorState { ticks(limit: 5) { timestamp skipReason } } } } }""",
            {"sensor": selector(sensor)},
        )
        ticks = answer["sensorOrError"]["sensorState"]["ticks"]
        return [tick["skipReason"] or "" for tick in ticks if tick["timestamp"] >= since]


def selector(sensor: str) -> dict[str, str]:
    return {"repositoryName": REPOSITORY, "repositoryLocationName": LOCATION, "sensorName": sensor}
