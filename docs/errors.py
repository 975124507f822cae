"""Writes docs/errors.md from the classes of errors in the code: `python docs/errors.py`. A test compares the two."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_suffix(".md")
PACKAGES = ("streaming_jobs", "reprocessing", "quality", "orchestration")
BASE = "RecourseError"
_OPENING = """# Errors

<!-- Written by docs/errors.py from the docstrings of the classes. Change those, then: python docs/errors.py -->

Every error that Recourse raises on purpose has a code and says what was found and what to do next. Codes never change;
texts may.

*Retried: yes* means that the session retries a stream with this error, soon at first and then every ten minutes. The
other errors need a person. [cli.md](cli.md) and [operate.md](operate.md) list the exit codes.

| code | name | retried | meaning |
|---|---|---|---|
"""


class Kind(NamedTuple):
    """One class of errors, as its source says."""

    name: str
    base: str
    code: str
    meaning: str
    what_to_do: str
    again: bool


@cache
def kinds() -> tuple[Kind, ...]:
    """Every class of errors with a code of its own, by code; raises ValueError for a code that two classes have."""
    found: dict[str, ast.ClassDef] = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, node)
    made = [kind for name in found if (kind := _kind(name, found)) is not None]
    codes = [kind.code for kind in made]
    if doubled := {code for code in codes if codes.count(code) > 1}:
        raise ValueError(f"codes of more than one class: {', '.join(sorted(doubled))}")
    return tuple(sorted(made, key=lambda kind: kind.code))


def _kind(name: str, classes: dict[str, ast.ClassDef]) -> Kind | None:
    above = _line(name, classes)
    code = _value(classes[name], "code")
    if BASE not in above or not isinstance(code, str):
        return None
    text = inspect.cleandoc(ast.get_docstring(classes[name]) or "")
    meaning, _, rest = text.partition("\n\n")
    again = "TransientError" in above and name != "LeaseBusy"  # that one ends the session
    return Kind(name, (above[1:] or [""])[0], code, _one_line(meaning), _one_line(rest), again)


def _line(name: str, classes: dict[str, ast.ClassDef]) -> list[str]:
    """The class and those it is made from, the nearest first."""
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name) and base.id in classes]
    return [name, *(each for base in bases for each in _line(base, classes))]


def _value(node: ast.ClassDef, name: str) -> str | int | None:
    for statement in node.body:
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else getattr(statement, "targets", [])
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = getattr(statement, "value", None)
            return value.value if isinstance(value, ast.Constant) else None  # type: ignore[return-value]
    return None


def _one_line(text: str) -> str:
    return text.replace("``", "`").replace("\n", " ")


def page() -> str:
    """The whole page."""
    rows = [
        f"| [{k.code}](#{k.code.lower()}) | `{k.name}` | {'yes' if k.again else 'no'} | {k.meaning} |" for k in kinds()
    ]
    sections = [
        f"\n## {k.code}\n`{k.name}`{_is_a(k)}. {k.meaning}\n\n**What to do**: {k.what_to_do}\n" for k in kinds()
    ]
    return _OPENING + "\n".join(rows) + "\n" + "".join(sections)


def _is_a(kind: Kind) -> str:
    return f", a `{kind.base}`" if kind.base and kind.base != BASE else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
