"""Advice that cannot rot: what errors, alerts, pages and docs advise to run is a command that can be typed."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from orchestration.cli.app import app
from streaming_jobs.text import commands
from tests.support import ROOT

pytestmark = pytest.mark.slow

SOURCES = [
    path
    for package in ("streaming_jobs", "reprocessing", "quality", "orchestration")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path != Path(str(commands.__file__))
]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HELP = ("help", "short_help", "description")
BY_HAND = re.compile(
    r"\brecourse (?:"
    r"(?:recover|streams|savepoints|generations|slices|late|deadletters|quarantine|state|tables|quality|config|demo|jobs|"
    r"bundle) [a-z-]+|"
    r"(?:up|init|send|doctor|feed|topics|chaos|verify|preview|deploy|metrics|inspect|adopt|mcp|events|fleet|lineage|schema|trace)\b)"
)
NO_ADVICE = {"next: (recourse recover plan .+)", "asked by recourse streams stop"}
"""A pattern that finds a command in what another one has printed; who asked for a stop."""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def root() -> Any:
    return get_command(app)


def leaf(words: list[str]) -> tuple[Any, str, list[str]]:
    """The command that words name, and what is left of them."""
    command, name = root(), "recourse"
    while hasattr(command, "commands"):
        name = words[0]
        assert name in command.commands, f"there is no command {name}"
        command, words = command.commands[name], words[1:]
    return command, name, words


def parse(line: str) -> None:
    """Parse a command as the command line does, without running it; raises for anything that it would refuse."""
    recourse, *words = shlex.split(line)
    assert recourse == "recourse"
    command, name, rest = leaf(words)
    command.make_context(name, rest)


def advice(path: Path) -> Iterator[str]:
    """The commands that a module advises, with values in the place of what it knows when it runs."""
    for node in ast.walk(tree(path)):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("commands.")):
            continue
        make = getattr(commands, node.func.attr)  # type: ignore[attr-defined]
        values = {
            str(keyword.arg): keyword.value.value if isinstance(keyword.value, ast.Constant) else "1"
            for keyword in node.keywords
        }
        yield make(*("1" for _ in node.args), **values)


def test_every_advised_command_is_parsed_by_the_command_line() -> None:
    advised = {line for path in SOURCES for line in advice(path)}
    assert len(advised) > 40
    for line in sorted(advised):
        parse(line)


def test_each_function_of_the_module_is_advised_somewhere() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    functions = [name for name, _ in inspect.getmembers(commands, inspect.isfunction) if not name.startswith("_")]
    assert not [name for name in functions if f"commands.{name}(" not in text]


@pytest.mark.parametrize(
    "line", ["recourse recover pla x", "recourse recover plan x --to-bach 1", "recourse streams stop"]
)
def test_what_cannot_be_typed_is_noticed(line: str) -> None:
    with pytest.raises(Exception, match="pla|to-bach|names"):
        parse(line)


def test_no_command_is_advised_by_hand() -> None:
    by_hand = []
    for path in SOURCES:
        nodes = list(ast.walk(tree(path)))
        no_advice = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        for node in nodes:
            if isinstance(node, ast.keyword) and node.arg in HELP:
                no_advice |= {id(inner) for inner in ast.walk(node.value)}
        by_hand += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {node.value.strip()}"
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in no_advice
            if BY_HAND.search(node.value) and node.value not in NO_ADVICE
        ]
    assert not by_hand, "make them by streaming_jobs/text/commands.py"


def test_commands_that_texts_and_docs_mention_exist() -> None:
    for path in (*SOURCES, *DOCS):
        for words in re.findall(r"`recourse ([a-z][a-z -]*[a-z])", path.read_text(encoding="utf-8")):
            command = root()
            for word in words.split():
                if not hasattr(command, "commands"):
                    break
                assert word in command.commands, f"{path.relative_to(ROOT)}: recourse {words}"
                command = command.commands[word]
