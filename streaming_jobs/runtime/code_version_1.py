"""The hash of a stream's code by scheme 1, with which entries of earlier versions of Recourse are compared.

It does not see formats, modules outside of the setting `flows`, and statements that change a value in place. Nothing
here may change: the hash of unchanged code has to be that in old ledgers.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
import textwrap
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from types import ModuleType

from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.runtime.code_version import dump, module_source, reached
from streaming_jobs.stream import MAX_AHEAD, KafkaTopic, Stream


def hash_1(stream: Stream, roots: tuple[str, ...]) -> str:
    """12 hexadecimal digits of SHA-256."""
    digest = hashlib.sha256()
    digest.update(_function_tree(stream).encode())
    declaration = (stream.name, repr(_declared(stream)))
    digest.update(repr(declaration).encode())
    module = sys.modules.get(stream.function.__module__)
    for name, source in _local_imports(module, roots):
        digest.update(f"\n{name}\n{dump(ast.parse(source))}".encode())
    return digest.hexdigest()[:12]


def _declared(stream: Stream) -> list[object]:
    topics = [
        (parameter, t.name, t.time_column, t.lateness, t.tombstones, t.records.schema.json())
        + ((t.max_ahead,) if t.event_time and t.max_ahead != MAX_AHEAD else ())
        for parameter, t in stream.sources.items()
        if isinstance(t, KafkaTopic)
    ]
    tables = [
        (parameter, "table", t.name, t.event_time, t.lateness, t.max_ahead, t.columns.json())
        for parameter, t in stream.sources.items()
        if isinstance(t, DeltaSource)
    ]
    sinks = [
        (name, s.name, s.keys, s.order_by, s.delete_when, s.partition_by, s.schema and s.schema.simpleString())
        + ((s.emit,) if s.emit is not None else ())
        for name, s in stream.sinks.items()
    ]
    rules = {name: rules for name, rules in stream.rules.items() if rules}
    written = [
        (name, s.name, *map(_option, s.options.items()), type(s.topic.value).__name__, s.topic.value.schema.json())
        for name, s in stream.topic_sinks.items()
    ]
    return [[*topics, *tables], sinks, *([rules] if rules else []), *([written] if written else [])]


def _option(option: tuple[str, str]) -> tuple[str, str]:
    """An option of a topic by its name in scheme 1, in which `emit` had Spark's names."""
    name, value = option
    return ("output_mode", "append" if value == "close" else value) if name == "emit" else option


def _function_tree(stream: Stream) -> str:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(stream.function)))
    except (OSError, SyntaxError):
        code = stream.function.__code__
        return repr((code.co_code, code.co_consts, code.co_names))
    function = tree.body[0]
    if isinstance(function, ast.FunctionDef):
        function.decorator_list = []
    module = sys.modules.get(stream.function.__module__)
    return dump(ast.Module([function], [])) + "\n".join(dump(used) for used in _used_beside(function, module))


def _used_beside(function: ast.stmt, module: ModuleType | None) -> list[ast.stmt]:
    statements = ast.parse(module_source(module) or "").body
    defined = {name: s for s in statements for name in _defines(s)}
    used: dict[str, ast.stmt] = {}
    waiting: list[ast.AST] = [function]
    while waiting:
        for node in ast.walk(waiting.pop()):
            name = node.id if isinstance(node, ast.Name) else ""
            if name in defined and name not in used and name != getattr(function, "name", ""):
                used[name] = defined[name]
                waiting.append(defined[name])
    return [used[name] for name in sorted(used)]


def _defines(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    return [n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def _local_imports(module: ModuleType | None, roots: tuple[str, ...]) -> list[tuple[str, str]]:
    own = module.__name__ if module else ""

    def find(name: str) -> ModuleSpec | None:
        if name == own or not any(name == root or name.startswith(f"{root}.") for root in roots):
            return None
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):  # not a module but something in one
            return None
        return spec if spec is not None and isinstance(spec.loader, InspectLoader) else None

    return sorted((name, source) for name, (_, source) in reached(module, find).items())
