"""The code version changes when what a stream computes may change, and stays when only its looks do."""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streaming_jobs.runtime.code_version import _declared, code_version, package_version
from streaming_jobs.stream import DeltaTable, Stream, stream
from tests.support.things import THINGS, plain, windows

FLOW = '''
"""Streams."""
from pyspark.sql.types import LongType, StructField, StructType
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream
from tests.support.worlds import NoBytes
from made_flows.constants import LIMIT
from made_flows.shared import cleaned
from made_flows import names
from . import relative

FACTOR = 2
LOW, HIGH = 1, 9
SCHEMA = StructType([StructField("n", LongType())])


def scaled(frame):
    """Scale."""
    return frame * FACTOR


def unused(frame):
    return frame


@stream(source=KafkaTopic("things", value=NoBytes()), sink=DeltaTable("totals"))
def totals(things):
    """Totals."""
    from made_flows.lazily import THREE  # as asked for

    return scaled(cleaned(things)) + LIMIT + LOW + names.ONE + relative.TWO + THREE
'''
SHARED = '''
from made_flows.deeper import base


def cleaned(frame):
    """Clean."""
    return base(frame)
'''
MODULES = {
    "__init__": "",
    "flow": FLOW,
    "shared": SHARED,
    "constants": "LIMIT = 5\n",
    "deeper": "def base(frame):\n    return frame\n",
    "names": "ONE = 1\n",
    "relative": "TWO = 2\n",
    "lazily": "THREE = 3\n",
}

Hash = Callable[..., str]


@pytest.fixture
def version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hash]:
    """The hash of the stream `totals` with modules changed: `version(flow=("FACTOR = 2", "FACTOR = 3"))`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "made_flows"]:
            del sys.modules[name]
        importlib.invalidate_caches()

    def version(roots: tuple[str, ...] = ("made_flows",), **changes: tuple[str, str]) -> str:
        folder = tmp_path / "made_flows"
        folder.mkdir(exist_ok=True)
        for name, text in MODULES.items():
            old, new = changes.get(name, ("", ""))
            assert old in text
            (folder / f"{name}.py").write_text(text.replace(old, new) if old else text)
        forget()
        importlib.import_module("linecache").checkcache()
        stream: Stream = importlib.import_module("made_flows.flow").totals
        return code_version(stream, roots).hash

    yield version
    forget()


def test_a_version_is_short_and_the_same_each_time(version: Hash) -> None:
    assert re.fullmatch(r"[0-9a-f]{12}", version())
    assert version() == version()


CHANGES = {
    "the function": {"flow": ("scaled(cleaned(things))", "cleaned(things)")},
    "a function that it calls": {"flow": ("frame * FACTOR", "frame + FACTOR")},
    "a constant that a called function uses": {"flow": ("FACTOR = 2", "FACTOR = 3")},
    "a constant among several": {"flow": ("LOW, HIGH = 1, 9", "LOW, HIGH = 2, 9")},
    "a function imported from a local module": {"shared": ("return base(frame)", "return frame")},
    "a constant imported from a local module": {"constants": ("LIMIT = 5", "LIMIT = 6")},
    "a local module that is imported whole": {"names": ("ONE = 1", "ONE = 2")},
    "a local module that is imported relatively": {"relative": ("TWO = 2", "TWO = 3")},
    "a local module that is imported inside the function": {"lazily": ("THREE = 3", "THREE = 4")},
    "what a local module imports": {"deeper": ("return frame", "return -frame")},
    "the table": {"flow": ('DeltaTable("totals")', 'DeltaTable("totals", partition_by=["n"])')},
    "the topic": {"flow": ('KafkaTopic("things"', 'KafkaTopic("things", tombstones="keep"')},
}
LOOKS = {
    "a comment": {"flow": ("# as asked for", "# as asked for twice")},
    "the docstring": {"flow": ('"""Totals."""', '"""Totals of everything."""')},
    "a called function's docstring": {"flow": ('"""Scale."""', '"""Scale it."""')},
    "a docstring in a local module": {"shared": ('"""Clean."""', "")},
    "what is said of the table": {"flow": ('DeltaTable("totals")', 'DeltaTable("totals", description="Totals")')},
    "the layout": {"flow": ("return scaled(cleaned(things))", "return  scaled( cleaned( things ))")},
    "a function that it does not use": {
        "flow": ("def unused(frame):\n    return frame", "def unused(frame):\n    return 7")
    },
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_the_version_changes_with(version: Hash, change: dict[str, tuple[str, str]]) -> None:
    assert version(**change) != version()


@pytest.mark.parametrize("change", LOOKS.values(), ids=LOOKS.keys())
def test_the_version_stays_with_a_change_of(version: Hash, change: dict[str, tuple[str, str]]) -> None:
    assert version(**change) == version()


def test_modules_outside_of_the_packages_that_declare_streams_are_the_packages_version(version: Hash) -> None:
    change = {"constants": ("LIMIT = 5", "LIMIT = 6")}
    assert version(("elsewhere",), **change) == version(("elsewhere",))


def test_a_function_declared_in_a_shell_has_a_version_too() -> None:
    from tests.support.worlds import parity

    space: dict[str, object] = {}
    versions = []
    for body in ("things", "things", "things + 1"):
        exec(textwrap.dedent(f"def made(things): return {body}"), space)
        made = Stream("made", space["made"], parity.sources, parity.sinks)  # type: ignore[arg-type]
        versions.append(code_version(made, ()).hash)
    assert versions[0] == versions[1] != versions[2]


def test_the_package_names_its_version() -> None:
    assert re.match(r"\d", package_version())


def test_a_lambda_whose_lines_are_no_statement_of_their_own_has_a_version_too() -> None:
    one = stream(
        source=THINGS,
        sink=DeltaTable("t"),
        name="s",
    )(lambda things: things.select("k"))
    other = stream(
        source=THINGS,
        sink=DeltaTable("t"),
        name="s",
    )(lambda things: things.select("n"))
    assert code_version(one, []) != code_version(other, [])


def test_another_bound_on_event_times_is_another_version_and_the_default_one_is_none() -> None:
    """Code of before there was a bound keeps its version: no savepoint, and nothing to explain."""
    flows = ["tests.support.things"]
    bounded = replace(windows, sources={"things": replace(THINGS, max_ahead="1 hour")})
    assert code_version(bounded, flows).hash != code_version(windows, flows).hash
    assert "1 day" not in repr(_declared(windows)) and "1 hour" in repr(_declared(bounded))
    untimed = replace(plain, sources={"things": replace(THINGS, event_time=None, lateness=None)})
    same = replace(untimed, sources={"things": replace(untimed.sources["things"], max_ahead=None)})
    assert code_version(untimed, flows).hash == code_version(same, flows).hash
