"""`recourse mcp` as an assistant meets it: a process, spoken to by the protocol's own client."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from orchestration.cli.mcp_server import TOOLS
from tests.support import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("empty_folder")]

READ, PLAN, APPLY = ({tool.__name__ for tool in TOOLS[access]} for access in ("read", "plan", "apply"))


def ask(do: Callable[[Client], Awaitable[Any]], *options: str) -> Any:
    """What a client gets from a server with these options of `recourse`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = ["-m", "orchestration.cli", *options, "mcp"]
    server = StdioServerParameters(command=sys.executable, args=arguments, env=environment, cwd=str(Path.cwd()))

    async def talk() -> Any:
        async with Client(stdio_client(server)) as client:
            return await do(client)

    return asyncio.run(asyncio.wait_for(talk(), 90))


def tools(*options: str) -> dict[str, Any]:
    listed = ask(lambda client: client.list_tools(), *options)
    return {tool.name: tool for tool in listed.tools}


def test_by_default_an_assistant_reads_and_plans_with_the_settings_of_the_server_and_applies_nothing() -> None:
    async def talk(client: Client) -> Any:
        calls = (
            ("streams_list", {}),
            ("stream_ledger", {"stream": "nonsense"}),
            ("recovery", {"plan": "--offsets"}),
            ("apply_recovery", {"plan": "stock-0001"}),
        )
        answers = [await client.call_tool(name, arguments) for name, arguments in calls]
        return (await client.list_tools()).tools, [(one.is_error, one.content[0].text) for one in answers]

    offered, (listed, refused, odd, denied) = ask(talk, "--set", "flows=streaming_jobs.examples.shop.streams")
    assert {tool.name for tool in offered} == READ | PLAN
    assert all(tool.annotations.read_only_hint == (tool.name in READ) and tool.description for tool in offered)

    assert not listed[0] and {"availability", "stock_changes"} <= {one["stream"] for one in json.loads(listed[1])}
    assert refused[0] and "REC-001" in refused[1] and "nonsense" in refused[1], "the command's own message"
    assert odd[0] and "--offsets" in odd[1] and "no such option" not in odd[1].lower(), "a name is never an option"
    assert denied[0] and "apply_recovery" in denied[1], "a tool that is not offered cannot be called either"


def test_the_policy_says_which_tools_there_are() -> None:
    offered = tools("--set", 'mcp.allow=["read", "apply"]')
    assert set(offered) == READ | APPLY
    assert all(offered[name].annotations.destructive_hint for name in APPLY)
