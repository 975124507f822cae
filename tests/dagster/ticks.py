"""Sensors, ticked on an instance in memory."""

from __future__ import annotations

import dagster as dg
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin

from orchestration.definitions import definitions
from streaming_jobs.settings import Settings

REPOSITORY = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("streams"), "__repository__")


class Ticks:
    """Sensor ticks on an instance in memory."""

    def __init__(self, settings: Settings, instance: dg.DagsterInstance) -> None:
        self.settings = settings
        self.instance = instance
        self.defs = definitions(settings)

    def tick(self, sensor: str, cursor: str | None = None) -> object:
        context = dg.build_sensor_context(instance=self.instance, definitions=self.defs, cursor=cursor)
        definition = next(s for s in self.defs.sensors or [] if s.name == sensor)
        return definition(context)

    def run(self, status: dg.DagsterRunStatus, **tags: str) -> str:
        job = self.defs.resolve_job_def("shop")
        run = self.instance.create_run_for_job(
            job,
            status=status,
            tags={**job.tags, **tags},  # as Dagster launches it
            remote_job_origin=RemoteJobOrigin(REPOSITORY, "shop"),  # a run in the queue has to have one
        )
        return run.run_id

    def happened(self, run_id: str, what: dg.DagsterEventType) -> None:
        self.instance.report_dagster_event(dg.DagsterEvent(what.value, "shop"), run_id=run_id)

    def look(self) -> dict[str, tuple[bool, str]]:
        """Run one tick of the sensor; returns its verdicts by table."""
        result = self.tick("stream_health")
        assert isinstance(result, dg.SensorResult)
        for event in result.asset_events:
            self.instance.report_runless_asset_event(event)
        evaluations = [event for event in result.asset_events if isinstance(event, dg.AssetCheckEvaluation)]
        return {e.asset_key.to_user_string(): (e.passed, str(e.metadata["verdict"].value)) for e in evaluations}
