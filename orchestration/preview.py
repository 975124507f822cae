"""The job `preview`: what the code on disk would change in a stream's newest rows, launched from the launchpad.

The step runs `recourse preview` in a child process, as a session runs its driver. The run succeeds if the rows are
equal or different, and fails if the code is broken; its metadata and its tag say which, with the report.

(No postponed annotations here: Dagster looks at the types of a step.)
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import Field

from orchestration.bundle.job import Bundle
from orchestration.sessions.bounded_log import BoundedLog
from orchestration.sessions.child_run import ChildRun, code_block, session_executor, table
from orchestration.sessions.configuration import FOUND, Configuration
from orchestration.sessions.names import named
from orchestration.sessions.ownership import claim, job_tags
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.platform.processes.child import ChildCommand, ChildProcess
from streaming_jobs.settings import Settings

JOB, STEP = "preview", "replay_and_compare"
VERDICT_TAG = "recourse/verdict"
"""Tag of a run: `equal`, `different`, `broken` or `cannot start`."""
RUN_TAGS = {"dagster/priority": "-10", "dagster/max_runtime": "21600"}
"""Sessions go first in the queue; a preview that hangs is ended after six hours."""

_DEPLOYABLE = (0, 10)
"""Exit codes of a finished preview of code that may be deployed."""
_PATIENCE = 40.0
"""Seconds for a preview that was asked to end to remove its folders."""
_ROWS = 50

Command = Callable[[Sequence[str]], list[str]]


class PreviewConfig(dg.Config):
    stream: str = Field(description="The stream whose code on disk is tried.")
    last: str = Field(default="", description="From the newest savepoint at least that old, such as 2 hours.")
    from_savepoint: str = Field(default="", description="From this savepoint. Empty, both: the newest with records.")
    suites: bool = Field(default=True, description="The stream's suites have to pass on the rebuilt rows.")

    def arguments(self) -> list[str]:
        chosen = ["--last", self.last] if self.last else []
        chosen += ["--from-savepoint", self.from_savepoint] if self.from_savepoint else []
        return [*chosen, "--suites" if self.suites else "--no-suites"]


def preview_command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "orchestration.cli", "preview", *arguments]


def definitions(
    topology: Topology,
    settings: Settings,
    bundle: Bundle,
    command: Command = preview_command,
    origin: Configuration = FOUND,
    executor: dg.ExecutorDefinition = session_executor,
) -> dg.Definitions:
    """The job, if there are streams; raises ConfigurationError if one of the bundle's jobs has its name."""
    bundle.refuse([JOB, STEP], "the job of previews")
    if not topology.streams:
        return dg.Definitions()

    @dg.op(
        name=named(settings.dagster, STEP),
        description="Replays the newest records beside the running stream, and compares the rows.",
    )
    def replay_and_compare(context: dg.OpExecutionContext, config: PreviewConfig) -> dg.Output[str]:
        return run_preview(context, settings, config, command, origin)

    @dg.job(
        name=named(settings.dagster, JOB),
        description="What the code on disk would change in a stream's newest rows. Nothing is published. Streams: "
        + ", ".join(topology.streams),
        tags={**job_tags(settings, JOB), **RUN_TAGS},
        executor_def=executor,
    )
    def preview() -> None:
        replay_and_compare()

    return dg.Definitions(jobs=[preview])


def run_preview(
    context: dg.OpExecutionContext,
    settings: Settings,
    config: PreviewConfig,
    command: Command,
    origin: Configuration = FOUND,
) -> dg.Output[str]:
    """Run one preview to its end; raises Failure for code that must not be deployed, and for a preview that failed."""
    run_id = context.run_id
    claim(context.instance, run_id, settings, JOB)
    log = BoundedLog(settings.logs / "preview.log")
    run = ChildRun(context, log, f"--- run {run_id}: preview of {config.stream}", _PATIENCE)
    with tempfile.TemporaryDirectory(prefix="recourse-preview-") as folder:
        result = Path(folder) / "preview.json"

        def start() -> ChildProcess:
            line = command([*config.arguments(), "--json", str(result), "--", config.stream])
            with log.open() as output:  # reaped: the command does not read its standard input
                environment = {**os.environ, **origin.environment(), "RECOURSE_RUN_ID": run_id}
                child = ChildCommand(line, environment).start_reaped(output)
            context.log.info("process %d previews stream %s; its log: %s", child.pid, config.stream, log.path)
            return child

        ending = run.to_end(start)
        value = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else None
    if ending.interrupt is not None:
        raise ending.interrupt
    if ending.gone or value is None:
        reason = ending.gone or _last_error(run.tail()) or ending.in_words("the preview")
        run.ends_with([reason])
        raise dg.Failure(reason, {"exit_code": ending.code, **run.log_metadata()}, allow_retries=False)
    context.instance.add_run_tags(run_id, {VERDICT_TAG: value["verdict"]})
    shown = {**metadata(value), "log": dg.MetadataValue.path(str(log.path)), "text": code_block(run.tail())}
    if ending.code not in _DEPLOYABLE:
        raise dg.Failure("; ".join([value["verdict"], *value["reasons"]]), shown, allow_retries=False)
    context.log.info("verdict: %s", value["verdict"])
    return dg.Output(value["verdict"], metadata=shown)


def metadata(value: Mapping[str, Any]) -> dict[str, Any]:
    """A preview's JSON as metadata: the verdict, numbers for all tables together and for each, the report."""
    tables = value["tables"]
    columns = {
        "table": "string",
        **dict.fromkeys(("published_rows", "rebuilt_rows", "corrected", "new", "gone"), "int"),
    }
    return {
        "verdict": value["verdict"],
        "stream": value["stream"],
        "code": value["code"]["hash"],
        "published_code": ", ".join(code["hash"] for code in value["published_code"]),
        "savepoint": value["savepoint"] or "the stream's start",
        "records": value["records"],
        **{f"rows_{kind}": sum(one[kind] for one in tables) for kind in ("corrected", "new", "gone")},
        "seconds": float(value["seconds"].get("in all", 0.0)),
        "report": dg.MetadataValue.url(Path(value["report"]).as_uri()),
        "report_file": dg.MetadataValue.path(value["report"]),
        **({"tables": table(columns, [[one[name] for name in columns] for one in tables[:_ROWS]])} if tables else {}),
    }


def _last_error(log: str) -> str:
    """The newest error in the preview's log, with its next step; empty if there is none."""
    lines = log.splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("REC-")]
    return "\n".join(lines[errors[-1] : errors[-1] + 2]) if errors else ""
