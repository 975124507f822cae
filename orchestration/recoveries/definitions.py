"""The job `recover`: plan, apply, resume, undo and abort recoveries from the Launchpad.

(No postponed annotations here: Dagster looks at the type of a step's `context`.)
"""

from collections.abc import Callable, Mapping, Sequence

import dagster as dg

from orchestration.bundle.job import Bundle
from orchestration.recoveries.launchpad import JOB, STEP, Launchpad, example, schema
from orchestration.sessions.child_run import session_executor
from orchestration.sessions.configuration import FOUND, Configuration
from orchestration.sessions.ownership import RECOVERY_KIND, job_tags
from streaming_jobs.settings import Settings

DESCRIPTION = """Puts streams right after a bug, in the Launchpad:

- `do: plan` with `streams` and a `target` shows what would happen; nothing is changed. Start here.
- `do: apply` with the `plan`'s id rebuilds the rows beside the published ones, checks and publishes them. A plan that
  was cut off is continued. With `pause_before_publishing: true` it ends when the rows have been compared; the next
  `do: apply` publishes them.
- `do: resume` continues a plan; `do: abort` gives it up before it has published; `do: undo` takes a published one back.

Terminating the run is safe: readers see the old rows, and the plan can be continued or given up."""


def definitions(
    settings: Settings,
    tables: Mapping[str, Sequence[dg.AssetKey]],
    bundle: Bundle,
    command: Callable[[], list[str]] | None = None,
    origin: Configuration = FOUND,
    executor: dg.ExecutorDefinition = session_executor,
) -> dg.Definitions:
    """The job for these streams, with the assets of their tables; none without streams.

    Raises ConfigurationError if one of the bundle's jobs has its name.
    """
    bundle.refuse([JOB, STEP], "the recoveries' job")
    streams = list(tables)
    if not streams:
        return dg.Definitions()

    launchpad = Launchpad.of(settings)

    @dg.op(name=launchpad.step, config_schema=schema(streams), out=dg.Out(dg.Nothing), description=DESCRIPTION)
    def recover(context: dg.OpExecutionContext) -> None:
        from orchestration.recoveries.run import recovery_command, run_recovery

        run_recovery(context, settings, tables, (command or recovery_command)(), origin)

    @dg.job(
        name=launchpad.job,
        description=DESCRIPTION,
        config=launchpad.run_config(example(streams)),
        tags=job_tags(settings, RECOVERY_KIND),
        executor_def=executor,
    )
    def job() -> None:
        recover()

    return dg.Definitions(jobs=[job])
