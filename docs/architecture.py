"""Draws docs/images/rooms.svg from the code's own imports, and writes the table of rooms into docs/architecture.md.

    python docs/architecture.py

A room is a package that has modules; the modules at the root of streaming_jobs form four rooms.
A test compares diagram and table with the code, and checks the steps of the two walks: each names a function or
class, and each step's module imports the module of an earlier step or is imported by it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_suffix(".md")
PICTURE = PAGE.with_name("images") / "rooms.svg"
PACKAGES = ("streaming_jobs", "reprocessing", "quality", "orchestration")
SESSION = "streaming_jobs.session"
_OF_THE_ROOT = {
    SESSION: SESSION,
    "streaming_jobs.warm_up": SESSION,
    "streaming_jobs.errors": "streaming_jobs.errors",
    "streaming_jobs.settings": "streaming_jobs.settings",
    "streaming_jobs.settings_files": "streaming_jobs.settings",
    "streaming_jobs.settings_kafka": "streaming_jobs.settings",
    "streaming_jobs.settings_sections": "streaming_jobs.settings",
    "streaming_jobs.settings_services": "streaming_jobs.settings",
}
"""The rooms of the modules at the root of streaming_jobs; all other modules there are in the room `streaming_jobs`."""

RECORD = (
    ("streaming_jobs.session", "Session", "takes the leases, starts Spark, starts and supervises the streams"),
    ("streaming_jobs.runtime.stream_runner", "StreamRunner", "runs one stream: checks, starts, retries"),
    (
        "streaming_jobs.runtime.stream_queries",
        "SparkQueries",
        "the stream's query over Kafka: checks and starts it, reads the topics' ends",
    ),
    ("streaming_jobs.preflight.rules", "check_start", "checks that checkpoint, tables and topics agree"),
    (
        "streaming_jobs.runtime.query_builder",
        "QueryBuilder",
        "builds a query from topics, the stream's function and tables",
    ),
    (
        "streaming_jobs.sources.kafka",
        "KafkaSource",
        "reads and decodes the records of a range of offsets, of which `FrameSource` counts the bad ones",
    ),
    ("streaming_jobs.runtime.batch", "BatchPipeline", "Spark calls it for each batch, whose range is already fixed"),
    ("streaming_jobs.sinks.base", "Sink", "the methods that a batch needs of any output"),
    ("streaming_jobs.sinks.delta.writers", "prepare_write", "computes and stages the rows, still invisible to readers"),
    ("streaming_jobs.sinks.delta.row_engine", "RowEngine", "what each row must satisfy before it is written"),
    ("streaming_jobs.sinks.delta.sink", "DeltaSink", "commits rows and ledger entry together, once"),
    ("streaming_jobs.runtime.batch_hooks", "BatchFiles", "the files that a batch writes beside its tables"),
    ("streaming_jobs.state.ledger_file", "LedgerFile", "appends a line for the batch beside the state"),
)
RECOVERY = (
    (
        "orchestration.cli.recover",
        "plan",
        "the command; Dagster's job is in `orchestration.recoveries.definitions`",
    ),
    ("orchestration.recoveries.request", "make_requested", "turns the request into a plan over its streams"),
    ("reprocessing.plan.planner", "make_plan", "decides where the replay starts, estimates its cost, freezes the plan"),
    (
        "reprocessing.plan.snapshot",
        "planning_snapshot",
        "reads the present record, tables, topics and history",
    ),
    ("reprocessing.plan.targets", "resolve", "turns the target into offsets and the end of a batch"),
    ("orchestration.recoveries.request", "carry_out", "applies, resumes, aborts or undoes a plan in one process"),
    ("reprocessing.executor", "apply", "runs the stages and records each in the journal"),
    (
        "reprocessing.stages.stages",
        "TakeSavepoint",
        "saves the stream as it is, so that abort and undo can restore it",
    ),
    ("reprocessing.stages.publish", "fence", "from now on only this plan may start the stream"),
    ("reprocessing.stages.stages", "Prepare", "creates staging tables and state from the savepoint"),
    ("reprocessing.stages.replay", "replay", "runs an ordinary session on staging, with the corrected code"),
    ("reprocessing.stages.stages", "Audit", "compares rebuilt with published rows, and checks the rules"),
    ("reprocessing.stages.publish", "publish", "replaces the old rows by the rebuilt ones, in one commit per table"),
    ("streaming_jobs.sinks.stored", "StoredTable", "the methods that a recovery needs of a table, in any store"),
    ("streaming_jobs.sinks.delta.sink", "DeltaSink", "implements it for Delta tables"),
)


@cache
def modules() -> Mapping[str, ast.Module]:
    """Every module of the four packages, parsed, by its name."""
    found = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found[name] = ast.parse(file.read_text(encoding="utf-8"))
    return found


@cache
def is_package(module: str) -> bool:
    """True if the module is a package."""
    return (ROOT / Path(*module.split(".")) / "__init__.py").is_file()


def room_of(module: str) -> str:
    """The room that a module lies in."""
    if module in _OF_THE_ROOT:
        return _OF_THE_ROOT[module]
    return module if is_package(module) else module.rpartition(".")[0]


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of ours that a module imports, also inside functions."""
    return frozenset(_imports(module))


def _imports(module: str) -> Iterator[str]:
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield from [name for name in (full, node.module) if name in modules()][:1]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())


@cache
def arrows() -> Mapping[str, frozenset[str]]:
    """The rooms that each room imports. A package's own `__init__`, which only passes names on, does not count."""
    found: dict[str, set[str]] = {room_of(module): set() for module in modules() if not is_package(module)}
    for module in modules():
        if is_package(module):
            continue
        here = room_of(module)
        found[here] |= {there for name in imports(module) if (there := room_of(name)) != here and there in found}
    return {room: frozenset(found[room]) for room in sorted(found)}


@cache
def levels() -> Mapping[str, int]:
    """How many rooms lie below each, one on another; raises CycleError if rooms import each other in a circle."""
    found: dict[str, int] = {}
    for room in TopologicalSorter(arrows()).static_order():
        found[room] = 1 + max((found[below] for below in arrows()[room]), default=-1)
    return found


def needed(room: str) -> list[str]:
    """The arrows that are drawn: those that no chain of others already tells."""
    below = arrows()[room]
    return [each for each in sorted(below) if not any(each in reach(other) for other in below if other != each)]


@cache
def reach(room: str) -> frozenset[str]:
    """Every room below."""
    return frozenset().union(*({below} | reach(below) for below in arrows()[room]))


def sentence(room: str) -> str:
    """What the room is for: the first line of its docstring, as far as it goes without naming a file to read."""
    text = (ast.get_docstring(modules()[room]) or "").split("\n\n")[0].replace("\n", " ")
    if room == SESSION:
        return "The driver: one process that runs one or more streams in one Spark session."
    return re.split(r" (?:Read|Open) `", text)[0]


def first_file(room: str) -> str:
    """The file to read first, as the room's docstring says."""
    if not is_package(room):  # a module of the root
        return f"{room.rpartition('.')[2]}.py"
    found = re.search(r"(?:Read|Open) `([^`]+)`", ast.get_docstring(modules()[room]) or "")
    return found.group(1) if found else ""


def table() -> str:
    """The rooms, from the top down."""
    lines = ["| room | what it is for | read first | modules |", "|---|---|---|---|"]
    counts = {room: sum(room_of(m) == room and not is_package(m) for m in modules()) for room in arrows()}
    for room in sorted(arrows(), key=lambda each: (-levels()[each], each)):
        words = sentence(room).replace("|", "\\|")
        lines.append(f"| `{room}` | {words} | `{first_file(room)}` | {counts[room]} |")
    return "\n".join(lines)


def walk(steps: Iterable[tuple[str, str, str]]) -> str:
    """A walk as a numbered list; raises ValueError for a step that is not in the code."""
    lines, seen = [], []
    for number, (module, symbol, words) in enumerate(steps, 1):
        if symbol not in {getattr(node, "name", "") for node in modules()[module].body}:
            raise ValueError(f"{module} has no {symbol}")
        linked = any(module in imports(other) or other in imports(module) for other in seen)
        if seen and not linked and module not in seen:
            raise ValueError(f"{module} has nothing to do with the steps before it")
        seen.append(module)
        path = module.replace(".", "/") + ".py"
        lines.append(f"{number}. [`{symbol}`](../{path}) in `{module}`: {words}")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with its generated parts made anew; each stands between two comments that name it."""
    for name, made in (("rooms", table()), ("record", walk(RECORD)), ("recovery", walk(RECOVERY))):
        text, count = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m, made=made: f"{m[1]}{made}\n{m[2]}", text, flags=re.S
        )
        if count != 1:
            raise ValueError(f"the page has {count} places for {name}")
    return text


_COLUMNS = {
    "orchestration.cli": 0,
    "orchestration.local_dagster": 0,
    "orchestration.metrics": 6,
    "orchestration": 0,
    "orchestration.quality": 0,
    "orchestration.recoveries": 1,
    "orchestration.sessions": 0,
    "orchestration.deploys": 1,
    "orchestration.slices": 2,
    "orchestration.redrives": 3,
    "orchestration.bundle": 0,
    "quality": 5,
    "quality.runs": 5,
    "quality.engines": 5,
    "quality.table_checks": 4,
    "quality.examples": 6,
    "reprocessing": 1,
    "reprocessing.stages": 1,
    "reprocessing.preview": 2,
    "reprocessing.report": 1,
    "reprocessing.timeline": 4,
    "reprocessing.slices": 2,
    "reprocessing.redrive": 3,
    "reprocessing.replay": 2,
    "reprocessing.plan": 1,
    "streaming_jobs.pytest_plugin": 5,
    "streaming_jobs.testing": 4,
    "streaming_jobs.session": 2,
    "streaming_jobs.runtime": 2,
    "streaming_jobs.preflight": 2,
    "streaming_jobs.state": 2,
    "streaming_jobs.sinks": 1,
    "streaming_jobs.sinks.delta": 1,
    "streaming_jobs.sinks.kafka": 3,
    "streaming_jobs.sinks.postgres": 2,
    "streaming_jobs.platform": 2,
    "streaming_jobs.platform.processes": 1,
    "streaming_jobs.sources": 3,
    "streaming_jobs.table_sources": 3,
    "streaming_jobs.formats": 4,
    "streaming_jobs.registry": 4,
    "streaming_jobs.catalog": 0,
    "streaming_jobs.declare": 3,
    "streaming_jobs.settings": 2,
    "streaming_jobs.storage": 1,
    "streaming_jobs.ledger": 3,
    "streaming_jobs.text": 4,
    "streaming_jobs.errors": 2,
    "streaming_jobs.verification.chaos": 3,
    "streaming_jobs.verification": 3,
    "streaming_jobs.inspection": 5,
    "streaming_jobs.examples.flights": 4,
    "streaming_jobs.examples.stock": 1,
    "streaming_jobs.examples.shop": 5,
    "streaming_jobs.examples.payments": 6,
    "streaming_jobs": 1,
}
"""Where a room stands from left to right; how high follows from the arrows. A new room has to be given a place."""
_COLOURS = {"streaming_jobs": "#e8f1fb", "reprocessing": "#fdeee0", "quality": "#f4ecfa", "orchestration": "#eaf6e9"}
_WIDE, _HIGH, _GAP, _ROW = 210, 78, 34, 122


def picture() -> str:
    """The rooms as boxes, each below those that use it, and the arrows that no others already tell, as SVG."""
    if missing := set(arrows()) ^ set(_COLUMNS):
        raise ValueError(f"rooms without a place, or places without a room: {', '.join(sorted(missing))}")
    high = levels()
    top = max(high.values())
    place = {
        room: (_COLUMNS[room] * (_WIDE + _GAP) + _GAP + _WIDE / 2, 20 + (top - high[room]) * _ROW) for room in arrows()
    }
    if len(set(place.values())) < len(place):
        raise ValueError("two rooms stand in one place: give one of them another column")
    width, height = (max(_COLUMNS.values()) + 1) * (_WIDE + _GAP) + _GAP, (top + 1) * _ROW
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11"',
        f'viewBox="0 0 {width} {height}">',
        '<defs><marker id="to" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">',
        '<path d="M0 0 L8 4 L0 8 z" fill="#777"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for room, (x, y) in place.items():
        below = sorted(needed(room), key=lambda each: place[each])
        for number, other in enumerate(below):
            bx, by = place[other]
            start = x + 24 * (number - (len(below) - 1) / 2)
            end = bx + max(-60, min(60, (x - bx) / 8))
            lines.append(
                f'<path d="M{start:.0f} {y + _HIGH:.0f} C{start:.0f} {y + _HIGH + 50:.0f} {end:.0f} {by - 50:.0f} '
                f'{end:.0f} {by:.0f}" fill="none" stroke="#777" marker-end="url(#to)"/>'
            )
    for room, (x, y) in place.items():
        lines += list(_box(room, x - _WIDE / 2, y))
    return "\n".join([*lines, "</svg>\n"])


def _box(room: str, x: float, y: float) -> Iterator[str]:
    colour = _COLOURS[room.partition(".")[0]]
    yield f'<rect x="{x:.0f}" y="{y:.0f}" width="{_WIDE}" height="{_HIGH}" rx="6" fill="{colour}" stroke="#999"/>'
    yield f'<text x="{x + 8:.0f}" y="{y + 16:.0f}" font-weight="bold">{escape(room)}</text>'
    for number, line in enumerate(wrap(sentence(room).replace("`", ""), 36)[:4]):
        yield f'<text x="{x + 8:.0f}" y="{y + 32 + 13 * number:.0f}">{escape(line)}</text>'


def main() -> None:
    """Write the picture and the page."""
    PICTURE.write_text(picture(), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
