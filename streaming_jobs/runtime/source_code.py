"""The source behind a stream: the tree of its module, and the modules that it imports, without importing them."""

from __future__ import annotations

import ast
import inspect
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from importlib.metadata import packages_distributions
from types import ModuleType

Found = tuple[ModuleSpec, str]
"""A module's spec and its source text."""

_PLATFORM = frozenset({__name__.partition(".")[0], "pyspark", "py4j", "delta"})
"""Packages that are no part of a stream's code even where PYTHONPATH has them, as spark-submit does."""


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
    """What finds the modules of a stream's code: those that are not installed, and its own ones if they are.

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
    return frozenset(_imports(ast.parse(source), package))


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
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


def dump(tree: ast.AST) -> str:
    """The tree as text, without docstrings, comments and layout."""
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
