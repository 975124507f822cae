"""Which code a stream runs: a hash of its function, of what that uses in its own module, and of local imports.

Local means: below one of the packages that declare streams (setting `flows`). What is hashed is the syntax
tree without docstrings, so comments, layout and docstrings do not make a new version; the package's own
version is recorded beside the hash.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from streaming_jobs.ledger import CodeVersion
from streaming_jobs.stream import Stream


def code_version(stream: Stream, flows: Iterable[str]) -> CodeVersion:
    """The version of the code behind a stream; 12 hexadecimal digits of SHA-256."""
    roots = tuple(flows)
    digest = hashlib.sha256()
    digest.update(_function_tree(stream).encode())
    declaration = (stream.name, repr(_declared(stream)))
    digest.update(repr(declaration).encode())
    own = sys.modules.get(stream.function.__module__)
    for module in _local_imports(own, roots):
        digest.update(f"\n{module.__name__}\n{_module_tree(module)}".encode())
    return CodeVersion(digest.hexdigest()[:12], package_version())


def package_version() -> str:
    """The installed version of recourse-streams; `0+source` when run from a bare checkout."""
    try:
        return version("recourse-streams")
    except PackageNotFoundError:
        return "0+source"


def _declared(stream: Stream) -> list[object]:
    sources = [
        (parameter, t.name, t.event_time, t.lateness, t.tombstones, t.value.schema.json())
        for parameter, t in stream.sources.items()
    ]
    sinks = [
        (name, s.name, s.keys, s.order_by, s.delete_when, s.partition_by, s.schema and s.schema.simpleString())
        for name, s in stream.sinks.items()
    ]
    return [sources, sinks]


def _function_tree(stream: Stream) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(stream.function))
    except OSError:  # declared in a shell: its byte code and constants are all there is
        code = stream.function.__code__
        return repr((code.co_code, code.co_consts, code.co_names))
    tree = ast.parse(source)
    function = tree.body[0]
    if isinstance(function, ast.FunctionDef):
        function.decorator_list = []
    module = sys.modules.get(stream.function.__module__)
    return _dump(tree) + "\n".join(_dump(used) for used in _used_beside(function, module))


def _used_beside(function: ast.stmt, module: ModuleType | None) -> list[ast.stmt]:
    """The top-level statements of the function's own module that define what it uses, directly or not."""
    try:
        statements = ast.parse(inspect.getsource(module)).body if module else []
    except (OSError, TypeError):
        statements = []
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
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _local_imports(module: ModuleType | None, roots: tuple[str, ...]) -> list[ModuleType]:
    seen: dict[str, ModuleType] = {}
    waiting = [module] if module else []
    while waiting:
        current = waiting.pop()
        for value in vars(current).values():
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            found = sys.modules.get(name) if isinstance(name, str) else None
            if found is None or found is module or found.__name__ in seen or not _below(found.__name__, roots):
                continue
            seen[found.__name__] = found
            waiting.append(found)
    return [seen[name] for name in sorted(seen)]


def _below(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def _module_tree(module: ModuleType) -> str:
    try:
        return _dump(ast.parse(inspect.getsource(module)))
    except (OSError, TypeError):
        return ""


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
