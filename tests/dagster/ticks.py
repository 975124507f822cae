"""Sensors, ticked on an instance in memory."""

from __future__ import annotations

import dagster as dg
from dagster._core.remote_origin import RemoteJobOrigin

from orchestration.bundle import job_yaml
from orchestration.location import definitions
from orchestration.sessions.definitions import sessions
from orchestration.sessions.names import named
from orchestration.sessions.ownership import identity
from orchestration.sessions.supervisor import SessionSpec
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.settings import Settings
from tests.support.dagster_homes import REPOSITORY

DEAD_WORKER = f"{identity().rsplit(':', 2)[0]}:999999999:gone"


class Ticks:
    """Sensor ticks on an instance in memory."""

    def __init__(self, settings: Settings, instance: dg.DagsterInstance) -> None:
        self.settings = settings
        self.instance = instance
        self.defs = definitions(settings)

    def tick(self, sensor: str, cursor: str | None = None) -> object:
        context = dg.build_sensor_context(instance=self.instance, definitions=self.defs, cursor=cursor)
        name = named(self.settings.dagster, sensor)
        definition = next(s for s in self.defs.sensors or [] if s.name == name)
        return definition(context)

    def result(self, sensor: str, cursor: str | None = None) -> dg.SensorResult:
        result = self.tick(sensor, cursor)
        assert isinstance(result, dg.SensorResult)
        return result

    def run(self, status: dg.DagsterRunStatus, **tags: str) -> str:
        name = named(self.settings.dagster, "shop")
        job = self.defs.resolve_job_def(name)
        run = self.instance.create_run_for_job(
            job,
            status=status,
            tags={**job.tags, **tags},  # as Dagster launches it
            remote_job_origin=RemoteJobOrigin(REPOSITORY, name),  # a run in the queue has to have one
        )
        return run.run_id

    @property
    def session(self) -> SessionSpec:
        bundle = job_yaml.load(job_yaml.find(self.settings))
        (session,) = sessions(bundle, Topology.load(self.settings.flows), self.settings)
        return session

    def status(self, run_id: str) -> str:
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        return run.status.value

    def keepalive(self) -> str | None:
        """The reason why keepalive starts nothing; None if it starts a session."""
        decision = self.tick("keepalive_shop")
        assert isinstance(decision, (dg.RunRequest, dg.SkipReason))
        return decision.skip_message if isinstance(decision, dg.SkipReason) else None

    def happened(self, run_id: str, what: dg.DagsterEventType) -> None:
        self.instance.report_dagster_event(dg.DagsterEvent(what.value, "shop"), run_id=run_id)

    def look(self) -> dict[str, tuple[bool, str]]:
        """Run one tick of the sensor; returns its verdicts by table."""
        result = self.result("stream_health")
        for event in result.asset_events:
            self.instance.report_runless_asset_event(event)
        evaluations = [event for event in result.asset_events if isinstance(event, dg.AssetCheckEvaluation)]
        return {e.asset_key.to_user_string(): (e.passed, str(e.metadata["verdict"].value)) for e in evaluations}
