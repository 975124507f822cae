"""Everything Dagster shows and runs, made from the declared streams and the job YAML. Open this file first.

Loading it starts no JVM and contacts no broker. `workspace.yaml` and `recourse up` both load this module; `location`
puts the definitions together.
"""

from __future__ import annotations

from functools import partial

import dagster as dg
import structlog

from orchestration.bundle import last_good
from orchestration.location import location
from orchestration.sessions.supervisor import Command
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.runtime.session_options import session_command
from streaming_jobs.settings import Settings, load


def definitions(settings: Settings, command: Command = session_command) -> dg.Definitions:
    """The code location; raises RecourseError where streams or job YAML cannot be used."""
    topology = Topology.of_settings(settings)
    make = partial(location, topology=topology, settings=settings, command=command)
    fault = last_good.PresentFault(settings, topology, make)
    return last_good.use(settings, topology, partial(make, fault=fault))


_loaded = load()
structlog.get_logger().info("code location", **_loaded.sources)
defs = definitions(_loaded.settings)
