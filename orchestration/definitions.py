"""Everything Dagster shows and runs, made from the declared streams and the job YAML. Open this file first.

Loading it starts no JVM and contacts no broker. `workspace.yaml` and `recourse up` both load this module, a code
location of its own; `build_defs` makes the same definitions for a code location of somebody else.
"""

from __future__ import annotations

import dagster as dg

from orchestration.location import build_defs
from orchestration.sessions.child_run import session_executor

# The executor of the location is that of runs without a job: those launched from the page of a table or a check.
defs = dg.Definitions.merge(build_defs(), dg.Definitions(executor=session_executor))
