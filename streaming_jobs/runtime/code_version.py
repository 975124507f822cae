"""The version of a stream's code: a hash of its function, of the names it uses in its own module, and of local imports.

Local means: below one of the packages that declare streams (setting `flows`). The hash is of the syntax tree without
docstrings, so comments, layout and docstrings do not make a new version; the version of the package is recorded beside
the hash. Imports are read from the source, so a module that is imported for one value counts too.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterable, Iterator
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from streaming_jobs.delta_source import DeltaSource
from streaming_jobs.ledger import CodeVersion
from streaming_jobs.stream import MAX_AHEAD, KafkaTopic, Stream


def code_version(stream: Stream, flows: Iterable[str]) -> CodeVersion:
    """The version of the code behind a stream; 12 hexadecimal digits of SHA-256."""
    roots = tuple(flows)
    digest = hashlib.sha256()
    digest.update(_function_tree(stream).encode())
    declaration = (stream.name, repr(_declared(stream)))
    digest.update(repr(declaration).encode())
    module = sys.modules.get(stream.function.__module__)
    for name, tree in _local_imports(module, roots):
        digest.update(f"\n{name}\n{_dump(tree)}".encode())
    return CodeVersion(digest.hexdigest()[:12], package_version())


_LOADED: dict[Callable[..., object], CodeVersion] = {}


def loaded_code(stream: Stream, flows: Iterable[str]) -> CodeVersion:
    """The version of the code that this process has loaded; read once, because the file may change while it runs."""
    if stream.function not in _LOADED:
        _LOADED[stream.function] = code_version(stream, flows)
    return _LOADED[stream.function]


def code_parts(stream: Stream, flows: Iterable[str]) -> dict[str, str]:
    """The parts of which `code_version` is made, each with its hash: the function, what it uses, local imports."""
    module = sys.modules.get(stream.function.__module__)
    name = stream.function.__qualname__
    parts = {f"function {name}": _short(_function_tree(stream, beside=False))}
    if (function := _function(stream)) is not None:
        for used in _used_beside(function, module):
            parts[", ".join(_defines(used))] = _short(_dump(used))
    for imported, tree in _local_imports(module, tuple(flows)):
        parts[f"module {imported}"] = _short(_dump(tree))
    return parts


def imported_files(stream: Stream) -> list[str]:
    """The files of all modules that the stream's code imports, directly or not, except installed ones.

    Includes modules imported inside functions, which perhaps only Spark's Python workers load, or nobody yet. Nothing
    is imported to find them.
    """
    module = sys.modules.get(stream.function.__module__)
    return sorted(str(spec.origin) for spec, _ in _reached(module, _not_installed).values())


def package_version() -> str:
    """The installed version of recourse-streams; `0+source` when run from a bare checkout."""
    try:
        return version("recourse-streams")
    except PackageNotFoundError:
        return "0+source"


def _declared(stream: Stream) -> list[object]:
    topics = [
        # The default bound is left out: code from before that setting existed keeps its version.
        (parameter, t.name, t.event_time, t.lateness, t.tombstones, t.value.schema.json())
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
        for name, s in stream.sinks.items()
    ]
    rules = {name: rules for name, rules in stream.rules.items() if rules}
    written = [
        (name, s.name, *s.options.items(), type(s.topic.value).__name__, s.topic.value.schema.json())
        for name, s in stream.topic_sinks.items()
    ]
    return [[*topics, *tables], sinks, *([rules] if rules else []), *([written] if written else [])]


def _function_tree(stream: Stream, *, beside: bool = True) -> str:
    function = _function(stream)
    if function is None:
        code = stream.function.__code__
        return repr((code.co_code, code.co_consts, code.co_names))
    module = sys.modules.get(stream.function.__module__)
    text = _dump(ast.Module([function], []))
    return text + "\n".join(_dump(used) for used in _used_beside(function, module)) if beside else text


def _function(stream: Stream) -> ast.stmt | None:
    """The function's statement without its decorators; None if its source is not to be had."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(stream.function)))
    except (OSError, SyntaxError):  # declared in a shell, or a lambda whose lines are no statement of their own
        return None
    function = tree.body[0]
    if isinstance(function, ast.FunctionDef):
        function.decorator_list = []
    return function


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _used_beside(function: ast.stmt, module: ModuleType | None) -> list[ast.stmt]:
    """The top-level statements of the function's own module that define what it uses, directly or not."""
    tree = _module_tree(module) if module else None
    statements = tree.body if tree else []
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


def _local_imports(module: ModuleType | None, roots: tuple[str, ...]) -> list[tuple[str, ast.Module]]:
    """Name and tree of each local module that the module imports, directly or not, also inside functions."""
    module_name = module.__name__ if module else ""
    reached = _reached(module, lambda name: _spec_of(name) if name != module_name and _below(name, roots) else None)
    return sorted((name, tree) for name, (_, tree) in reached.items())


def _reached(
    module: ModuleType | None, find: Callable[[str], ModuleSpec | None]
) -> dict[str, tuple[ModuleSpec, ast.Module]]:
    """The modules with a source that the module imports, directly or not, as far as `find` returns them."""
    modules: dict[str, tuple[ModuleSpec, ast.Module]] = {}
    tried: set[str] = set()
    waiting = [(module.__package__ or "", tree)] if module and (tree := _module_tree(module)) else []
    while waiting:
        package, tree = waiting.pop()
        for name in set(_imported(tree, package)) - tried:
            tried.add(name)
            if (spec := find(name)) is not None and (source := _source(spec)) is not None:
                modules[name] = spec, ast.parse(source)
                waiting.append((spec.parent or "", modules[name][1]))
    return modules


def _not_installed(name: str) -> ModuleSpec | None:
    """The spec of a module, without importing its parents; None if it is installed, or part of Recourse."""
    installed = tuple(sysconfig.get_path(each) for each in ("stdlib", "platstdlib", "purelib", "platlib"))
    if name.partition(".")[0] == __name__.partition(".")[0]:
        return None
    path, spec = None, None
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:number]), path)
        if spec is None or (spec.origin or "").startswith(installed):
            return None
        path = spec.submodule_search_locations
        if path is None and number < len(parts):  # not a module but something in one
            return None
    return spec


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Yields every name in an import that may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _spec_of(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # not a module but something in one
        return None


def _source(spec: ModuleSpec) -> str | None:
    return spec.loader.get_source(spec.name) if isinstance(spec.loader, InspectLoader) else None


def _below(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def _module_tree(module: ModuleType) -> ast.Module | None:
    try:
        return ast.parse(inspect.getsource(module))
    except (OSError, TypeError):  # a shell has no source
        return None


def _dump(tree: ast.AST) -> str:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
            and isinstance(body[0].value.value, str)
        ):
            node.body = body[1:] or [ast.Pass()]
    return ast.dump(tree)
