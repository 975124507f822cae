"""`recourse mcp`: commands of this program as tools for an assistant (Model Context Protocol over stdin and stdout).

A tool runs a command in a process of its own and returns the JSON that the command prints, so an assistant sees what a
person sees. The setting `mcp.allow` is the policy: tools that read, tools that plan, tools that apply.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import typer

from orchestration.cli.options import invocation
from streaming_jobs.platform.extras import require
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from mcp.server import MCPServer

_READ_SECONDS = 120.0
_PLAN_SECONDS = 1800.0  # of a preview, whose replay runs in Spark
_APPLY_SECONDS = 4 * 3600.0
_MOST_CHARACTERS = 200_000
"""Of one answer: about what fits an assistant's context."""

INSTRUCTIONS = """Recourse runs streams from Kafka to Delta tables. Begin with streams_status. When rows are wrong,
find the condition that they meet with sample_rows, then plan_recovery, and show the plan to a person. A plan changes no
table; applying it does: never apply a plan that a person has not confirmed in this conversation."""

BackTo = Literal[
    "before_first_bad", "to_batch", "to_datetime", "by_duration", "to_earliest", "savepoint", "before_code"
]


def mcp(context: typer.Context) -> None:
    """Serve tools to an assistant over stdin and stdout, until stdin ends.

    The setting mcp.allow says which: read, plan (recoveries and previews, which change no table), apply.
    """
    here = invocation(context)
    here.export()
    server(here.settings.mcp.allow).run("stdio")


def server(allow: Sequence[str]) -> MCPServer:
    """The server with the tools that `allow` names; raises MissingExtra without the package `mcp`."""
    require("mcp", commands.mcp())
    from mcp.server import MCPServer
    from mcp.types import ToolAnnotations

    made = MCPServer("recourse", instructions=INSTRUCTIONS, log_level="WARNING")
    for access in ("read", "plan", "apply"):
        for tool in TOOLS[access] if access in allow else ():
            hints = ToolAnnotations(read_only_hint=access == "read", destructive_hint=access == "apply")
            made.add_tool(tool, annotations=hints, structured_output=False)
    return made


async def streams_list() -> str:
    """The declared streams: topics, tables, job."""
    return await _read("streams", "list")


async def streams_status(streams: list[str] | None = None) -> str:
    """State, verdict, lag, watermark, rates and errors of streams; of all if none are named."""
    return await _read("streams", "status", names=streams or ())


async def describe_streams(streams: list[str] | None = None) -> str:
    """Which streams read and write which topics and tables."""
    return await _read("streams", "describe", names=streams or ())


async def stream_history(stream: str, since: str = "1 day") -> str:
    """Batches, deploys, sessions, failures, recoveries and savepoints of a stream since a duration or a time in UTC."""
    return await _read("streams", "history", f"--since={since}", names=[stream])


async def stream_ledger(stream: str, limit: int = 20, code_changes: bool = False) -> str:
    """The newest commits of a stream: batch, offsets, rows, version of the code; or the first of each version."""
    words = ["--code-changes"] if code_changes else []
    return await _read("streams", "ledger", f"--limit={limit}", *words, names=[stream])


async def sample_rows(table: str, where: str = "", order_by: str = "", rows: int = 10) -> str:
    """Rows of a table, the newest first; `where` is a SQL condition on its columns."""
    words = [f"--{name}={value}" for name, value in (("where", where), ("order-by", order_by)) if value]
    return await _read("streams", "sample", f"--rows={rows}", *words, names=[table])


async def topics() -> str:
    """The topics that streams read: offsets, records per second, lag of the readers."""
    return await _read("topics", "--seconds=1")


async def savepoints(stream: str) -> str:
    """The savepoints that a stream can go back to."""
    return await _read("savepoints", "list", names=[stream])


async def quality_list() -> str:
    """Suites of expectations on tables, with their last results."""
    return await _read("quality", "list")


async def quality_show(suite: str) -> str:
    """The last result of a suite: failing expectations, rows, the first batch that broke one."""
    return await _read("quality", "show", names=[suite])


async def recoveries() -> str:
    """Plans of recoveries, and the progress of each."""
    return await _read("recover", "list")


async def recovery(plan: str) -> str:
    """A plan with its steps, or the outcome of one that was applied."""
    return await _read("recover", "show", names=[plan])


async def plan_recovery(stream: str, back_to: BackTo, value: str = "", until: str = "") -> str:
    """Plan a recovery of a stream; changes no table.

    `value` belongs to `back_to`: a SQL condition that is true for wrong rows (before_first_bad), a batch number
    (to_batch), an ISO time with zone (to_datetime), a duration (by_duration), a savepoint, a version of the code;
    nothing for to_earliest. `until`, such as 'batch 120', corrects only up to there.
    """
    target = f"--{back_to.replace('_', '-')}"
    words = [target if back_to == "to_earliest" else f"{target}={value}", *([f"--until={until}"] if until else [])]
    return await _run("recover", "plan", *words, names=[stream], seconds=_PLAN_SECONDS)


async def preview(stream: str) -> str:
    """What the code on disk would change in a stream's newest rows; changes nothing. Takes a minute."""
    return await _run("preview", names=[stream], seconds=_PLAN_SECONDS)


async def apply_recovery(plan: str) -> str:
    """Apply a plan that a person has confirmed: replays beside the table, compares, publishes."""
    return await _run("recover", "apply", "--yes", names=[plan], seconds=_APPLY_SECONDS)


async def undo_recovery(plan: str) -> str:
    """Undo a recovery that was applied, after a person has confirmed it."""
    return await _run("recover", "undo", "--yes", names=[plan], seconds=_APPLY_SECONDS)


TOOLS: dict[str, list[Callable[..., Any]]] = {
    "read": [
        streams_list,
        streams_status,
        describe_streams,
        stream_history,
        stream_ledger,
        sample_rows,
        topics,
        savepoints,
        quality_list,
        quality_show,
        recoveries,
        recovery,
    ],
    "plan": [plan_recovery, preview],
    "apply": [apply_recovery, undo_recovery],
}
"""By what the policy allows."""


async def _read(*words: str, names: Sequence[str] = ()) -> str:
    return await _run(*words, names=names, seconds=_READ_SECONDS)


async def _run(*words: str, names: Sequence[str], seconds: float) -> str:
    """What a command prints as JSON; raises ToolError with its message if it prints none.

    `names` come after `--`, so that none of them is an option. If the assistant cancels the call, or the time is over,
    the command is killed: what a recovery had begun is finished by `recourse recover resume`.
    """
    import anyio
    from mcp.server.mcpserver.exceptions import ToolError

    command = [sys.executable, "-m", "orchestration.cli", *words, "-o", "json", "--", *names]
    try:
        with anyio.fail_after(seconds):
            ended = await anyio.run_process(command, check=False, stdin=subprocess.DEVNULL)
    except TimeoutError as error:
        raise ToolError(f"recourse {' '.join(words)}: no answer within {seconds:.0f} s") from error
    printed = ended.stdout.decode()
    if not printed.strip():
        raise ToolError(ended.stderr.decode()[-4000:] or f"exit code {ended.returncode}")
    if len(printed) > _MOST_CHARACTERS:
        raise ToolError(f"the answer has {len(printed)} characters: ask for fewer rows, streams or batches")
    return printed if ended.returncode == 0 else json.dumps(_with_exit_code(printed, ended))


def _with_exit_code(printed: str, ended: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    """An answer whose exit code says more: a red stream, rows that a preview changes, a failure after some output."""
    try:
        answer = json.loads(printed)
    except ValueError:
        answer = printed
    return {"exit_code": ended.returncode, "messages": ended.stderr.decode()[-4000:], "answer": answer}
