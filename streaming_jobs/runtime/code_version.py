"""The version of a stream's code: a hash of all that decides what the stream makes of a record.

That is: its function; the names that it uses in its own module, with the statements that change their values; every
module that this module imports and that is not installed, whole (for an installed stream those of its own distribution
too); what the stream declares, with the type, the options and the source of each format, and the functions of event
times; and the declared `files`. The hash is of the syntax trees without docstrings, so comments, layout and docstrings
do not make a new version. The version of the package is recorded beside the hash. Imports are read from the source, so
a module that is imported for one value counts too.

`3-` begins the hash: this is the third scheme, which names Recourse's own types without their modules. The hash by the
second scheme is recorded beside it; `CodeVersion.same_code` compares versions of both schemes.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import site
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, cached_property, lru_cache
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

from streaming_jobs.declare.error_policy import DEFAULT_POLICY
from streaming_jobs.declare.topic import ComputedTime, KafkaTopic
from streaming_jobs.ledger.entry import CodeVersion
from streaming_jobs.stream import Stream

# The source behind a stream: the tree of its module, and the modules that it imports, without importing them.

Found = tuple[ModuleSpec, str]
"""A module's spec and its source text."""

_PLATFORM = frozenset({__name__.partition(".")[0], "pyspark", "py4j", "delta"})
"""Packages that never belong to a stream's code, even if PYTHONPATH has them, as under spark-submit."""


def module_source(module: ModuleType | None) -> str | None:
    """The source text of a loaded module; None for a shell, which has none."""
    try:
        return inspect.getsource(module) if module is not None else None
    except (OSError, TypeError):
        return None


def reached(
    module: ModuleType | None, find: Callable[[str], ModuleSpec | None], further: tuple[str, ...] = ()
) -> dict[str, Found]:
    """The modules that the module and the `further` ones import, directly or not, as far as `find` returns them.

    Imports inside functions count. A `further` module is among the result itself.
    """
    modules: dict[str, Found] = {}
    tried: set[str] = set()
    waiting = [(module.__package__ or "", source)] if module and (source := module_source(module)) else []
    names = set(further)
    while waiting or names:
        if waiting:
            package, source = waiting.pop()
            names |= _imported(source, package)
        for name in names - tried:
            tried.add(name)
            if (spec := find(name)) is not None and (found := _source(spec)) is not None:
                modules[name] = spec, found
                waiting.append((spec.parent or "", found))
        names = set()
    return modules


def users_own(roots: tuple[str, ...], module: str) -> Callable[[str], ModuleSpec | None]:
    """Finds the modules of a stream's code: modules that are not installed, and the stream's own even if they are.

    Own are all modules below `roots` (the setting `flows`), and those of the installed distribution to which the roots
    and the stream's `module` belong. Never a part of Recourse or of Spark, unless it is below a root.
    """
    own = {top for name in (*roots, module) for top in _tops_of_distribution(name.partition(".")[0])}
    spec_of = _specs()

    def installed(top: str) -> bool:
        """Whether the whole package is: what is below one with an `__init__.py` lies in its folder."""
        spec = spec_of(top)
        return spec is None or (spec.origin or "").startswith(_installed())

    def find(name: str) -> ModuleSpec | None:
        below = any(name == root or name.startswith(f"{root}.") for root in roots)
        top = name.partition(".")[0]
        if not below and (name == module or top in _PLATFORM or (top not in own and installed(top))):
            return None
        spec = spec_of(name)
        if spec is None or name == module:
            return None
        return spec if below or top in own or not (spec.origin or "").startswith(_installed()) else None

    return find


@cache
def _tops_of_distribution(top: str) -> frozenset[str]:
    """The top-level packages of the installed distribution that has this one; empty if it is not installed."""
    spec = None if top in _PLATFORM else _specs()(top)
    where = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec is not None else []
    if not any(path.startswith(_installed()) for path in where):
        return frozenset()
    by_package = packages_distributions()
    distributions = set(by_package.get(top, ()))
    return frozenset({top, *(name for name, of in by_package.items() if distributions.intersection(of))})


@cache
def _installed() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return (*(sysconfig.get_path(each) for each in names), *site.getsitepackages(), site.getusersitepackages())


def _specs() -> Callable[[str], ModuleSpec | None]:
    """What finds the spec of a module without importing its parents; it looks for each module and parent once."""

    @cache
    def spec_of(name: str) -> ModuleSpec | None:
        parent, _, last = name.rpartition(".")
        if not last or name.startswith("."):  # a shell's module, or a relative import in one
            return None
        if not parent:
            return _found(name, None)
        above = spec_of(parent)
        if above is None or above.submodule_search_locations is None:  # not a module but something in one
            return None
        return _found(name, above.submodule_search_locations)

    return spec_of


def _found(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """The spec by the import path, else by a further finder, such as that of an editable installation."""
    if (spec := PathFinder.find_spec(name, path)) is not None:
        return spec
    further = (each for each in sys.meta_path if each not in (BuiltinImporter, FrozenImporter, PathFinder))
    return next((spec for finder in further if (spec := finder.find_spec(name, path)) is not None), None)


@lru_cache(maxsize=1_000)  # a recovery asks for the version of the code at each stage
def _imported(source: str, package: str) -> frozenset[str]:
    """Every name in an import that may be a module."""
    return frozenset(_import_names(ast.parse(source), package))


def _import_names(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _source(spec: ModuleSpec) -> str | None:
    """The source text; None for a module that has none, such as a namespace or a compiled one."""
    get_source = getattr(spec.loader, "get_source", None)  # an archive's loader is no InspectLoader
    try:
        text: str | None = get_source(spec.name) if get_source is not None else None
    except ImportError:
        return None
    return text


_WITH_EMPTY_LISTS: dict[str, Any] = {"show_empty": True} if sys.version_info >= (3, 13) else {}


def dump(tree: ast.AST) -> str:
    """The tree as text, without docstrings, comments and layout; the same text on every Python, namely that of 3.11."""
    for node in ast.walk(tree):
        if not getattr(node, "type_params", True):  # a field since 3.12
            del node.type_params  # type: ignore[attr-defined]
        body = getattr(node, "body", None)
        if (
            isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
            and isinstance(body[0].value.value, str)
        ):
            node.body = body[1:] or [ast.Pass()]
    return ast.dump(tree, **_WITH_EMPTY_LISTS)


_SCHEME, _FORMER_SCHEME = "3-", "2-"
_OWN = __name__.partition(".")[0]
_FORMER_MODULES = {
    **dict.fromkeys(("EpochSeconds", "EpochMillis", "EpochMicros", "ComputedTime", "TimedFormat"), "event_times"),
    **dict.fromkeys(("Between", "Holds", "InSet", "Matches", "NotNull", "RowRules", "Unique"), "rules"),
    **dict.fromkeys(("Text", "Raw"), "formats.raw"),
    "Avro": "formats.avro",
    "CloudEvents": "formats.cloud_events",
    "Csv": "formats.csv",
    "Debezium": "formats.debezium",
    "DeltaSource": "delta_source",
    "DeltaTable": "stream",
    "ErrorPolicy": "error_policy",
    "Json": "formats.json",
    "JsonSchema": "formats.json_schema",
    "KafkaSink": "kafka_sink",
    "KafkaTopic": "kafka_topic",
    "Lookup": "lookup",
    "PostgresTable": "postgres_table",
    "Protobuf": "formats.protobuf",
    "RecordTimestamp": "event_times",
    "Slices": "slices",
}
"""The module of each declared type, as the second scheme names it."""
TypeName = Callable[[type], str]
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NO_CODE = frozenset({"name", "cluster", "description", "owners", "slices", "store", "fresh_within", "late_rows"})
"""Options of a declaration that change no row; the name is said beside them. A store has rows of its own."""


def code_version(stream: Stream, flows: Iterable[str]) -> CodeVersion:
    """The version of the code behind a stream: the scheme, and 12 hexadecimal digits of SHA-256."""
    parts = _parts_without_formats(stream, tuple(flows))

    def hashed(type_name: TypeName) -> str:
        every = sorted({**parts, **_format_parts(stream, type_name)}.items())
        return _short(repr((stream.name, every, _declared(stream, type_name))))

    return CodeVersion(_SCHEME + hashed(_type), package_version(), _FORMER_SCHEME + hashed(_former_type))


_LOADED: dict[Callable[..., object], CodeVersion] = {}


def loaded_code(stream: Stream, flows: Iterable[str]) -> CodeVersion:
    """The version of the code that this process has loaded; read once, because the file may change while it runs."""
    if stream.function not in _LOADED:
        _LOADED[stream.function] = code_version(stream, flows)
    return _LOADED[stream.function]


def code_parts(stream: Stream, flows: Iterable[str]) -> dict[str, str]:
    """The parts of the version, each with its hash: the function, what it uses, imported modules, formats, files."""
    return {**_parts_without_formats(stream, tuple(flows)), **_format_parts(stream, _type)}


def _format_parts(stream: Stream, type_name: TypeName) -> dict[str, str]:
    described = {place: _described(each, type_name) for place, each in _formats(stream).items()}
    return {f"format of topic {place}": _short(repr(value)) for place, value in described.items()}


def _parts_without_formats(stream: Stream, roots: tuple[str, ...]) -> dict[str, str]:
    module = sys.modules.get(stream.function.__module__)
    function = _function(stream)
    named = [type(each).__name__ for each in _formats(stream).values()]
    named += [name for each in _time_functions(stream) for name in (each.__name__, *each.__code__.co_names)]
    used = _used_beside(function, module, named)
    text = _code_text(stream.function.__code__) if function is None else dump(ast.Module([function], []))
    parts = {f"function {stream.function.__qualname__}": _short(text)}
    for name, statements in used.items():
        parts[name] = _short("\n".join(dump(each) for each in statements))
    for imported, (_, source) in _imports(stream, roots).items():
        parts[f"module {imported}"] = _source_hash(source)
    for file, path in stream.files.items():
        parts[f"file {file}"] = _content(path)
    return parts


def imported_files(stream: Stream, flows: Iterable[str]) -> list[str]:
    """The files of the modules that are part of the stream's code, without its own module, and its declared files.

    Includes modules imported inside functions, which perhaps only Spark's Python workers load, or nobody yet. Nothing
    is imported to find them.
    """
    imports = (str(spec.origin) for spec, _ in _imports(stream, tuple(flows)).values())
    return sorted({*imports, *(str(path) for path in stream.files.values())})


def package_version() -> str:
    """The installed version of recourse-streams; `0+source` when run from a bare checkout."""
    try:
        return version("recourse-streams")
    except PackageNotFoundError:
        return "0+source"


def _imports(stream: Stream, roots: tuple[str, ...]) -> dict[str, Found]:
    name = stream.function.__module__ or ""  # a shell may have none
    further = {type(each).__module__ for each in _formats(stream).values()}
    further = (further | {each.__module__ for each in _time_functions(stream)}) - {name}
    return reached(sys.modules.get(name), users_own(roots, name), tuple(further))


def _formats(stream: Stream) -> dict[str, object]:
    read = {topic.name: topic.value for topic in stream.topics}
    return {**read, **{f"{sink.name} that it writes": sink.topic.value for sink in stream.topic_sinks.values()}}


def _time_functions(stream: Stream) -> list[FunctionType]:
    times = [topic.event_time for topic in stream.topics]
    return [cast("FunctionType", time.function) for time in times if isinstance(time, ComputedTime)]


def _declared(stream: Stream, type_name: TypeName) -> list[object]:
    parts: dict[str, Mapping[str, object]] = {
        "source": stream.sources,
        "sink": stream.sinks,
        "topic": stream.topic_sinks,
        "postgres": stream.postgres_tables,
        "rules": {name: rules for name, rules in stream.rules.items() if rules},
        "errors": {"": stream.errors} if stream.errors != DEFAULT_POLICY else {},
        "lookup": stream.lookups,
    }
    return [
        (kind, name, _described(each, type_name)) for kind, by_name in parts.items() for name, each in by_name.items()
    ]


def _described(value: object, type_name: TypeName) -> object:
    """A declared value in a form that is the same in each process; options that have their default are left out."""
    if hasattr(value, "jsonValue"):  # a type of Spark; comments of columns are not code
        return json.dumps(_without_comments(value.jsonValue()), sort_keys=True)
    if isinstance(value, Mapping):
        return [(str(name), _described(each, type_name)) for name, each in value.items()]
    if isinstance(value, FunctionType):  # a lambda is in no statement of its own
        return _code_text(value.__code__) if "<" in value.__qualname__ else value.__qualname__
    if isinstance(value, (list, tuple)):
        return [_described(each, type_name) for each in value]
    options = fields(value) if is_dataclass(value) and not isinstance(value, type) else ()
    if not options and type(value).__repr__ is not object.__repr__:
        return _ADDRESS.sub("", repr(value))
    said = [(each.name, _described(getattr(value, each.name), type_name)) for each in options if _is_said(value, each)]
    computed = {
        name for kind in type(value).__mro__ for name, d in vars(kind).items() if isinstance(d, cached_property)
    }
    own = getattr(value, "__dict__", {})
    beside = sorted(own.keys() - computed - {each.name for each in options})
    return (
        type_name(type(value)),
        getattr(value, "name", ""),
        said,
        [(name, _described(own[name], type_name)) for name in beside],
    )


def _is_said(declared: Any, option: Field[Any]) -> bool:
    if option.name in _NO_CODE or (option.name == "max_ahead" and not declared.event_time):
        return False
    if isinstance(declared, KafkaTopic) and option.name == "value":  # a part of its own
        return False
    default = option.default if option.default_factory is MISSING else option.default_factory()
    return bool(getattr(declared, option.name) != default)


def _type(kind: type) -> str:
    """The name of a type; one of Recourse's own has no module, so that it may move."""
    own = kind.__module__.startswith(f"{_OWN}.") and kind.__qualname__ in _FORMER_MODULES
    return f"{_OWN}.{kind.__qualname__}" if own else f"{kind.__module__}.{kind.__qualname__}"


def _former_type(kind: type) -> str:
    own = kind.__module__.startswith(f"{_OWN}.") and kind.__qualname__ in _FORMER_MODULES
    module = f"{_OWN}.{_FORMER_MODULES[kind.__qualname__]}" if own else kind.__module__
    return f"{module}.{kind.__qualname__}"


def _without_comments(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: {k: v for k, v in each.items() if k != "comment"} if name == "metadata" else _without_comments(each)
            for name, each in value.items()
        }
    return [_without_comments(each) for each in value] if isinstance(value, list) else value


def _function(stream: Stream) -> ast.stmt | None:
    """The function's statement without its declaration as a stream; None if its source is not to be had."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(stream.function)))
    except (OSError, SyntaxError):  # declared in a shell, or a lambda whose lines are no statement of their own
        return None
    function = tree.body[0]
    if isinstance(function, ast.FunctionDef):
        function.decorator_list = [each for each in function.decorator_list if not _declares(each)]
    return function


def _declares(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) == "stream"


def _content(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    except FileNotFoundError:  # removed since it was declared: the next declaration refuses it
        return "missing"


def _code_text(code: CodeType) -> str:
    constants = [_code_text(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return repr((code.co_code, constants, code.co_names))


@lru_cache(maxsize=1_000)  # a recovery asks for the version of the code at each stage
def _source_hash(source: str) -> str:
    return _short(dump(ast.parse(source)))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _used_beside(
    function: ast.stmt | None, module: ModuleType | None, named: Iterable[str]
) -> dict[str, list[ast.stmt]]:
    """By name, the top-level statements of the function's own module on which it or one of `named` depends.

    These define a name that is used, directly or not, or change its value: `TABLE["x"] = 1`, `RATES.update(more)`.
    """
    statements = ast.parse(module_source(module) or "").body
    by_name: dict[str, list[ast.stmt]] = {}
    for statement in statements:
        for name in dict.fromkeys(_defines(statement)):
            by_name.setdefault(name, []).append(statement)
    for statement in statements:
        for name in dict.fromkeys(_changes(statement)):
            if name in by_name and statement not in by_name[name]:
                by_name[name].append(statement)
    own = getattr(function, "name", "")
    used: dict[str, list[ast.stmt]] = {}
    waiting: list[ast.AST] = [*([function] if function else []), *(ast.Name(name, ast.Load()) for name in named)]
    while waiting:
        for node in ast.walk(waiting.pop()):
            name = node.id if isinstance(node, ast.Name) else ""
            if name in by_name and name not in used and name != own:
                used[name] = by_name[name]
                waiting += by_name[name]
    return {name: used[name] for name in sorted(used)}


def _defines(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    return [n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def _changes(statement: ast.stmt) -> list[str]:
    """The names whose values the statement may change in place: it sets a part of them, or calls with them."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)):
        return []
    names = []
    for node in ast.walk(statement):
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            names.append(_root(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            names.append(_root(node.func))
    if isinstance(statement, ast.Expr):
        names += [n.id for n in ast.walk(statement) if isinstance(n, ast.Name)]
    return names


def _root(node: ast.expr) -> str:
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
