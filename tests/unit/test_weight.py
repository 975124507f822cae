"""No file imports itself by way of others when the program starts, and the script that looks for that finds it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def weight() -> ModuleType:
    spec = importlib.util.spec_from_file_location("weight", ROOT / "docs" / "weight.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_files_import_each_other_in_a_circle_at_the_start(weight: ModuleType) -> None:
    modules = weight.read_modules()
    assert {"streaming_jobs.session", "reprocessing.executor", "orchestration.definitions"} <= modules.keys()
    assert weight.circles(weight.edges(modules, "top")) == []


@pytest.mark.parametrize(
    ("kind", "statement"),
    [
        ("top", "from p import a"),
        ("top", "import p.a"),
        ("top", "from p.a import Name"),
        ("top", "try:\n    import p.a\nexcept ImportError:\n    pass"),
        ("top", "class Body:\n    import p.a"),
        ("top", "if not TYPE_CHECKING:\n    import p.a"),
        ("top", "if TYPE_CHECKING:\n    pass\nelse:\n    import p.a"),
        ("types", "if TYPE_CHECKING:\n    import p.a"),
        ("types", "if typing.TYPE_CHECKING:\n    from p.a import Name"),
        ("function", "def later():\n    import p.a"),
        ("function", "class Body:\n    async def later(self):\n        from p import a"),
        ("function", "def later():\n    if TYPE_CHECKING:\n        import p.a"),
    ],
)
def test_a_circle_over_three_files_is_found_and_its_imports_are_of_one_kind(
    weight: ModuleType, kind: str, statement: str
) -> None:
    sources = {"p": "", "p.a": "import p.b", "p.b": "import p.c", "p.c": statement, "p.d": "import p.a"}
    modules = {name: ast.parse(source) for name, source in sources.items()}
    for other in ("top", "types", "function"):
        found = weight.circles(weight.edges(modules, *{"top", other}))
        assert found == ([["p.a", "p.b", "p.c"]] if kind in ("top", other) else [])


def test_a_class_name_in_two_modules_is_named_with_both(weight: ModuleType) -> None:
    modules = {"p.a": ast.parse("class One: ..."), "p.b": ast.parse("class One: ...\nclass Two: ...")}
    assert weight.doubled_classes(modules) == {"One": ["p.a", "p.b"]}
