"""Prints the size of the code and the circles in its imports: `python docs/weight.py`. It judges nothing.

An edge leads from a file to each module of ours that an import statement of the file names; the `__init__` of the
packages above, which the import runs too, is no edge. Imports at the top of a file, imports for types only and imports
inside functions are counted apart: only the first kind can break a program at its start; a test allows no circle of it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("streaming_jobs", "reprocessing", "quality", "orchestration")
BESIDE = ("benchmarks", "tests")

Kind = Literal["top", "types", "function"]
Modules = Mapping[str, ast.Module]


def read_modules(root: Path = ROOT, packages: Collection[str] = PACKAGES) -> Modules:
    """Every module of the packages, parsed, by its dotted name; a package stands for its `__init__`."""
    return {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): ast.parse(file.read_bytes())
        for package in packages
        for file in sorted((root / package).rglob("*.py"))
    }


def imports_of(tree: ast.AST, kind: Kind = "top") -> Iterator[tuple[Kind, str, tuple[str, ...]]]:
    """Each import below the node: its kind, the module that it names, and the names that it takes from the module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            yield kind, node.module or "", tuple(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((kind, alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports_of(node, "function")
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from imports_of(ast.Module(node.body, []), "types" if kind == "top" else kind)
            yield from imports_of(ast.Module(node.orelse, []), kind)
        else:
            yield from imports_of(node, kind)


def edges(modules: Modules, *kinds: Kind) -> Mapping[str, set[str]]:
    """The modules of ours that each module imports, by imports of these kinds."""
    found: dict[str, set[str]] = {module: set() for module in modules}
    for module, tree in modules.items():
        for kind, source, names in imports_of(tree):
            if kind in kinds:
                targets = {f"{source}.{name}" if f"{source}.{name}" in modules else source for name in names or ("",)}
                found[module] |= (targets & modules.keys()) - {module}
    return found


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """The largest groups of modules in which each one imports every other, directly or not."""
    below = {module: _reach(module, graph) for module in graph}
    groups = {tuple(sorted(other for other in below[module] if module in below[other])) for module in graph}
    return sorted(list(group) for group in groups if len(group) > 1)


def _reach(module: str, graph: Mapping[str, Collection[str]]) -> set[str]:
    reached: set[str] = set()
    open_ends = [module]
    while open_ends:
        for target in graph[open_ends.pop()]:
            if target not in reached:
                reached.add(target)
                open_ends.append(target)
    return reached


def doubled_classes(modules: Modules) -> Mapping[str, list[str]]:
    """Names of classes at the top of more than one module, with these modules."""
    found = defaultdict(list)
    for module, tree in modules.items():
        for name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}:
            found[name].append(module)
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def report() -> Iterator[str]:
    """The lines that the script prints."""
    for package in (*PACKAGES, *BESIDE):
        files = sorted((ROOT / package).rglob("*.py"))
        lines = sum(file.read_bytes().count(b"\n") for file in files)
        yield f"{package:<16}{len(files):>5} files {lines:>7,} lines"
    root = [file for file in (ROOT / "streaming_jobs").glob("*.py") if file.name != "__init__.py"]
    yield f"modules at the root of streaming_jobs: {len(root)}"
    modules = read_modules()
    doubled = doubled_classes(modules)
    yield f"class names in more than one module: {len(doubled)}{': ' if doubled else ''}{', '.join(doubled)}"
    at_start: tuple[Kind, ...] = ("top",)
    for words, kinds in (
        ("at the start", at_start),
        ("with imports for types", (*at_start, "types")),
        ("with imports inside functions", (*at_start, "function")),
    ):
        found = circles(edges(modules, *kinds))
        yield f"circles of imports {words}: {len(found)}"
        yield from (f"  {' '.join(group)}" for group in found)


if __name__ == "__main__":
    print("\n".join(report()))
