"""The component `RecourseStreams`, with which `dg` adds a project's streams to a Dagster project by YAML.

    type: orchestration.component.RecourseStreams
    attributes:
      config: streams/recourse.toml      # from the folder of this defs.yaml, where it is relative
      key_prefix: [prod]
      jobs: [orders]

It is `build_defs` with these arguments. The entry point group `dagster_dg_cli.registry_modules` names this module, so
`dg list components` shows it and `dg scaffold defs` writes such a file.
"""

from pathlib import Path
from typing import Any

import dagster as dg
from dagster.components import Scaffolder, ScaffoldRequest, scaffold_component
from pydantic import Field

from orchestration.location import build_defs
from streaming_jobs.settings import CONFIG_FILE

__all__ = ["RecourseStreams"]


class StreamsScaffolder(Scaffolder[Any]):
    """Writes a defs.yaml for the configuration file beside it."""

    def scaffold(self, request: ScaffoldRequest[Any]) -> None:
        scaffold_component(request, {"config": CONFIG_FILE, "key_prefix": [request.target_path.name]})


@dg.scaffold_with(StreamsScaffolder)
class RecourseStreams(dg.Component, dg.Resolvable, dg.Model):
    """Streams of a Recourse project: tables and topics as assets, a job for each session, checks, sensors."""

    config: str | None = Field(
        default=None,
        description="configuration file; relative: from the folder of this defs.yaml. None: as the commands find it",
    )
    home: str | None = Field(default=None, description="the home folder, in place of that of the configuration")
    key_prefix: list[str] = Field(
        default=[], description="first parts of every asset key, and of every name of a job, sensor or schedule"
    )
    jobs: list[str] | None = Field(default=None, description="jobs of the job YAML that belong here; None: all")

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Raises RecourseError where streams or job YAML cannot be used."""
        return build_defs(
            None if self.config is None else Path(context.path) / self.config,
            values={} if self.home is None else {"home": self.home},
            key_prefix=self.key_prefix or None,
            jobs=self.jobs,
        )
