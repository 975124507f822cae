"""The job `preview`: what the code on disk would change in a stream's newest rows, launched from the launchpad.

The step runs `recourse preview` in a child process, as a session runs its driver. The run succeeds if the rows are
equal or different, and fails if the code is broken; its metadata and its tag say which, with the report.

(No postponed annotations here: Dagster looks at the types of a step.)
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import Field

from orchestration.sessions.bounded_log import BoundedLog
from orchestration.sessions.ownership import claim, job_tags, parent_lives
from orchestration.sessions.supervisor import PARENT_VARIABLE, uninterrupted
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.platform.processes.child import ChildCommand, ChildProcess
from streaming_jobs.settings import Settings

JOB, STEP = "preview", "replay_and_compare"
VERDICT_TAG = "recourse/verdict"
"""Tag of a run: `equal`, `different`, `broken` or `cannot start`."""
RUN_TAGS = {"dagster/priority": "-10", "dagster/max_runtime": "21600"}
"""Sessions go first in the queue; a preview that hangs is ended after six hours."""

_FOUND = (0, 10)
"""Exit codes of a preview that came to its end, with code that may be deployed."""
_POLL, _LOOK_AT_RUN_EVERY = 0.5, 5.0
_PATIENCE, _JVM = 40.0, 10.0
"""Seconds for a preview that was asked to end to remove its folders; then for its JVM."""
_TAIL, _ROWS = 6000, 50

Command = Callable[[Sequence[str]], list[str]]


class PreviewConfig(dg.Config):
    """Which stream, and from where."""

    stream: str = Field(description="The stream whose code on disk is tried.")
    last: str = Field(default="", description="From the newest savepoint at least that old, such as 2 hours.")
    from_savepoint: str = Field(default="", description="From this savepoint. Empty, both: the newest with records.")
    suites: bool = Field(default=True, description="The stream's suites have to pass on the rebuilt rows.")

    def arguments(self) -> list[str]:
        """The options of the command."""
        chosen = [*(["--last", self.last] if self.last else [])]
        chosen += ["--from-savepoint", self.from_savepoint] if self.from_savepoint else []
        return [*chosen, "--suites" if self.suites else "--no-suites"]


def preview_command(arguments: Sequence[str]) -> list[str]:
    """The command line of a preview."""
    return [sys.executable, "-m", "orchestration.cli", "preview", *arguments]


def preview_job(
    topology: Topology, settings: Settings, taken: Sequence[str], command: Command = preview_command
) -> list[dg.JobDefinition]:
    """The job, if there are streams; raises ConfigurationError if one of the bundle's jobs has its name."""
    if JOB in taken or STEP in taken:
        raise ConfigurationError(f"resources.jobs.{JOB}: this name is that of the job of previews", "rename the job")
    if not topology.streams:
        return []

    @dg.op(name=STEP, description="Replays the newest records beside the running stream, and compares the rows.")
    def replay_and_compare(context: dg.OpExecutionContext, config: PreviewConfig) -> dg.Output[str]:
        return run_preview(context, settings, config, command)

    @dg.job(
        name=JOB,
        description="What the code on disk would change in a stream's newest rows. Nothing is published. Streams: "
        + ", ".join(topology.streams),
        tags={**job_tags(settings, JOB), **RUN_TAGS},
    )
    def preview() -> None:
        replay_and_compare()

    return [preview]


def run_preview(
    context: dg.OpExecutionContext, settings: Settings, config: PreviewConfig, command: Command
) -> dg.Output[str]:
    """Run one preview to its end; raises Failure for code that must not be deployed, and for a preview that failed."""
    run_id = context.run_id
    claim(context.instance, run_id, settings, JOB)
    log = BoundedLog(settings.logs / "preview.log")
    mark = f"--- run {run_id}: preview of {config.stream}"
    log.write(mark)
    with tempfile.TemporaryDirectory(prefix="recourse-preview-") as folder:
        result = Path(folder) / "preview.json"
        line = command([*config.arguments(), "--json", str(result), "--", config.stream])
        environment = {**os.environ, "RECOURSE_RUN_ID": run_id}
        with log.open() as output:
            child = ChildCommand(line, environment).start_reaped(output)
        context.log.info("process %d previews stream %s; its log: %s", child.pid, config.stream, log.path)
        try:
            code = _until_end(context, child)
        finally:
            with uninterrupted():
                child.end(_PATIENCE, _JVM)
                log.trim()
        value = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else None
    words = log.tail_from(mark, _TAIL)
    if value is None:
        raise dg.Failure(
            _last_error(words) or f"the preview ended with exit code {code}",
            {"exit_code": code, "log": dg.MetadataValue.path(str(log.path)), "log_tail": _code_block(words)},
            allow_retries=False,
        )
    context.instance.add_run_tags(run_id, {VERDICT_TAG: value["verdict"]})
    found = {**metadata(value), "log": dg.MetadataValue.path(str(log.path)), "text": _code_block(words)}
    if code not in _FOUND:
        raise dg.Failure("; ".join([value["verdict"], *value["reasons"]]), found, allow_retries=False)
    context.log.info("verdict: %s", value["verdict"])
    return dg.Output(value["verdict"], metadata=found)


def metadata(value: Mapping[str, Any]) -> dict[str, Any]:
    """A preview's JSON as metadata: the verdict, numbers for all tables together and for each, the report."""
    tables = value["tables"]
    found: dict[str, Any] = {
        "verdict": value["verdict"],
        "stream": value["stream"],
        "code": value["code"]["hash"],
        "published_code": ", ".join(each["hash"] for each in value["published_code"]),
        "savepoint": value["savepoint"] or "the stream's start",
        "records": value["records"],
        **{f"rows_{kind}": sum(table[kind] for table in tables) for kind in ("corrected", "new", "gone")},
        "seconds": float(value["seconds"].get("in all", 0.0)),
        "report": dg.MetadataValue.url(Path(value["report"]).as_uri()),
        "report_file": dg.MetadataValue.path(value["report"]),
    }
    if tables:
        columns = ("table", "published_rows", "rebuilt_rows", "corrected", "new", "gone")
        rows = [dg.TableRecord({name: table[name] for name in columns}) for table in tables[:_ROWS]]
        schema = dg.TableSchema([dg.TableColumn(name, "string" if name == "table" else "int") for name in columns])
        found["tables"] = dg.MetadataValue.table(rows, schema=schema)
    return found


def _until_end(context: dg.OpExecutionContext, child: ChildProcess) -> int:
    """Wait for the child; raises the interrupt if the run is to end, Failure if what started this worker is gone."""
    parent, looked = os.getppid(), time.monotonic()
    while (code := child.exit_code) is None:
        if os.getppid() != parent or not parent_lives(os.environ.get(PARENT_VARIABLE, "")):
            raise dg.Failure("the code server that this run belonged to is gone", allow_retries=False)
        if time.monotonic() - looked >= _LOOK_AT_RUN_EVERY:
            looked = time.monotonic()
            run = context.instance.get_run_by_id(context.run_id)
            if run is not None and run.status in (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED):
                raise dg.DagsterExecutionInterruptedError(f"the run is {run.status.value}")
        time.sleep(_POLL)
    return code


def _last_error(words: str) -> str:
    """The newest error in the preview's log, with its next step; empty if there is none."""
    lines = words.splitlines()
    place = next((at for at in range(len(lines) - 1, -1, -1) if lines[at].startswith("REC-")), None)
    return "" if place is None else "\n".join(lines[place : place + 2])


def _code_block(words: str) -> dg.MarkdownMetadataValue:
    safe = words.replace("```", "'''")
    return dg.MetadataValue.md(f"```\n{safe}\n```")
