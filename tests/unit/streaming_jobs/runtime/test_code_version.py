"""The code version changes when what a stream computes may change, and stays when only its looks do."""

from __future__ import annotations

import importlib
import re
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import NO_CODE, CodeVersion
from streaming_jobs.runtime.code_version import (
    _declared,
    _installed,
    _tops_of_distribution,
    _type,
    code_parts,
    code_version,
    imported_files,
    package_version,
    users_own,
)
from streaming_jobs.stream import DeltaTable, Stream, stream
from tests.support.things import THINGS, plain, windows
from tests.support.topic_flows import copied, total_changes

FLOW = '''
"""Streams."""
from pyspark.sql.types import LongType, StructField, StructType
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream
from made_formats import Framed
from made_helpers.common import sign
from made_flows.constants import LIMIT
from made_flows.shared import cleaned
from made_flows import names
from . import relative

FACTOR = 2
TABLE = {"x": 1}
TABLE["x"] = 2


class Rate:
    k = 1


Rate.k = 3
UNUSED = {}
UNUSED["x"] = 2
LOW, HIGH = 1, 9
SCHEMA = StructType([StructField("n", LongType())])


def scaled(frame):
    """Scale."""
    return frame * FACTOR


def unused(frame):
    return frame


@stream(source=KafkaTopic("things", value=Framed(4)), sink=DeltaTable("totals"), files=["rates.sql"])
def totals(things):
    """Totals."""
    from made_flows.lazily import THREE  # as asked for

    return scaled(cleaned(things)) + LIMIT + LOW + names.ONE + relative.TWO + THREE + TABLE["x"] + Rate.k + sign(1)
'''
SHARED = '''
from made_flows.deeper import base


def cleaned(frame):
    """Clean."""
    return base(frame)
'''
FORMATS = '''
from tests.support.worlds import NoBytes


class Framed(NoBytes):
    """Records behind a header."""

    def __init__(self, header):
        self.header = header

    def reader(self, fields=None):
        return super().reader(fields)
'''
BESIDE = {
    "made_formats.py": FORMATS,
    "made_helpers/__init__.py": "",
    "made_helpers/common.py": "from made_helpers.sizes import SIZE\n\n\ndef sign(n):\n    return n * SIZE\n",
    "made_helpers/sizes.py": "SIZE = 1\n",
    "made_flows/rates.sql": "SELECT 1",
}
"""Files that are not below the package that declares streams, and one that is no module."""
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
        for name in [name for name in sys.modules if name.split(".")[0].startswith("made_")]:
            del sys.modules[name]
        importlib.invalidate_caches()

    def version(roots: tuple[str, ...] = ("made_flows",), **changes: tuple[str, str]) -> str:
        beside = changes.pop("beside", ("", ""))
        folder = tmp_path / "made_flows"
        folder.mkdir(exist_ok=True)
        for name, text in MODULES.items():
            old, new = changes.get(name, ("", ""))
            assert old in text
            (folder / f"{name}.py").write_text(text.replace(old, new) if old else text)
        assert not beside[0] or any(beside[0] in text for text in BESIDE.values())
        for name, text in BESIDE.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text.replace(*beside) if beside[0] else text)
        forget()
        importlib.import_module("linecache").checkcache()
        stream: Stream = importlib.import_module("made_flows.flow").totals
        return code_version(stream, roots).hash

    yield version
    forget()


def test_a_version_is_short_and_the_same_each_time_and_the_package_names_its_own(version: Hash) -> None:
    assert re.fullmatch(r"3-[0-9a-f]{12}", version())
    assert version() == version()
    assert re.match(r"\d", package_version())


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
    "a module beside the packages that declare streams": {"beside": ("return n * SIZE", "return n * -SIZE")},
    "a module that such a module imports": {"beside": ("SIZE = 1", "SIZE = 100")},
    "a file that the stream declares": {"beside": ("SELECT 1", "SELECT 2")},
    "the source of a format": {"beside": ("super().reader(fields)", "super().reader(None)")},
    "an option of a format": {"flow": ("Framed(4)", "Framed(5)")},
    "a statement that sets a member of a used value": {"flow": ('TABLE["x"] = 2', 'TABLE["x"] = 3')},
    "a statement that sets an attribute of a used class": {"flow": ("Rate.k = 3", "Rate.k = 4")},
    "how long deletes are kept": {
        "flow": ('DeltaTable("totals")', 'DeltaTable("totals", keys=["n"], deletes_kept="1 day")')
    },
    "the headers of a topic": {"flow": ('KafkaTopic("things"', 'KafkaTopic("things", headers=True')},
    "the topic": {"flow": ('KafkaTopic("things"', 'KafkaTopic("things", tombstones="keep"')},
}
LOOKS = {
    "a comment": {"flow": ("# as asked for", "# as asked for twice")},
    "the docstring": {"flow": ('"""Totals."""', '"""Totals of everything."""')},
    "a called function's docstring": {"flow": ('"""Scale."""', '"""Scale it."""')},
    "a docstring in a local module": {"shared": ('"""Clean."""', "")},
    "what is said of the table": {"flow": ('DeltaTable("totals")', 'DeltaTable("totals", description="Totals")')},
    "how fresh the table has to be": {"flow": ('DeltaTable("totals")', 'DeltaTable("totals", fresh_within="1 hour")')},
    "the layout": {"flow": ("return scaled(cleaned(things))", "return  scaled( cleaned( things ))")},
    "a docstring of a format": {"beside": ('"""Records behind a header."""', '"""Records."""')},
    "a statement that sets a member of a value that it does not use": {"flow": ('UNUSED["x"] = 2', 'UNUSED["x"] = 3')},
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


def test_the_function_of_an_event_time_and_what_it_uses_are_code(version: Hash) -> None:
    def timed(time: str, shift: int = 1) -> str:
        topic = f'KafkaTopic("things", value=Framed(4), event_time={time}, lateness="1 hour")'
        functions = f"SHIFT = {shift}\n\n\ndef at(n):\n    return n + SHIFT\n\n\n@stream("
        flow = FLOW.replace('KafkaTopic("things", value=Framed(4))', topic).replace("@stream(", functions)
        imports = "from streaming_jobs import ComputedTime, EpochMillis, EpochSeconds\n"
        return version(flow=(FLOW, imports + flow))

    plain, named, two = version(), timed("ComputedTime(at)"), timed("ComputedTime(at)", shift=2)
    counted = timed("EpochSeconds('n')"), timed("EpochMillis('n')"), timed("EpochMillis('n', column='at')")
    computed = timed("ComputedTime(lambda n: n + 1)"), timed("ComputedTime(lambda n: n + 2)")
    used = timed("ComputedTime(lambda n: at(n))"), timed("ComputedTime(lambda n: at(n))", shift=2)
    assert len({plain, named, two, *counted, *computed, *used}) == 10
    assert timed("ComputedTime(at)") == named and timed("EpochSeconds('n')", shift=2) == counted[0]


def test_an_installed_stream_has_the_modules_of_its_own_distribution_in_its_version(
    version: Hash, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, others = {"beside": ("SIZE = 1", "SIZE = 2")}, {"beside": ("super().reader(fields)", "super().reader(None)")}
    monkeypatch.setattr("streaming_jobs.runtime.code_version._installed", lambda: (str(tmp_path),))
    by_package = {"made_flows": ["made"], "made_helpers": ["made"], "made_formats": ["another"]}
    monkeypatch.setattr("streaming_jobs.runtime.code_version.packages_distributions", lambda: by_package)
    _tops_of_distribution.cache_clear()
    try:
        assert version(**own) != version()
        assert version(**others) == version(), "another distribution: its version is not ours to hash"
    finally:
        _tops_of_distribution.cache_clear()


def test_modules_of_spark_are_not_the_streams_code_where_pythonpath_has_them(tmp_path: Path) -> None:
    find = users_own(("made_flows",), "made_flows.flow")
    assert find("pyspark.sql") is None and find("streaming_jobs.stream") is None
    assert find("json") is None and find("pyarrow") is None, "installed"
    assert find("tests.support.things") is not None
    assert sysconfig.get_path("purelib") in _installed()


def test_entries_of_the_scheme_before_are_the_same_code_if_that_scheme_says_so() -> None:
    today = code_version(plain, ["tests.support.things"])
    old = CodeVersion(today.formerly, "0.1.0", "323a4eaabccf")
    assert re.fullmatch(r"2-[0-9a-f]{12}", today.formerly)
    assert today.same_code(old) and old.same_code(today)
    assert not today.same_code(CodeVersion("2-000000000000", "0.1.0"))
    assert not NO_CODE.same_code(today) and not today.same_code(NO_CODE) and NO_CODE.same_code(NO_CODE)
    assert not CodeVersion(today.hash, "0.1.0").same_code(NO_CODE), (
        "nothing is not the code of an entry without a second hash"
    )
    mended = today._replace(hash="3-000000000000")
    assert not today.same_code(mended), "of one scheme, the hash decides"
    assert mended.same_code(old), "an old entry says only what its scheme saw"
    named = CodeVersion(today.hash, "0.1.0")
    assert today.same_code(named), "a hash alone, as a record of corrected batches has it"


def test_the_hash_of_the_scheme_before_is_that_in_older_ledgers() -> None:
    """Homes have it: a change of it would make their batches other code."""
    things, flows = ["tests.support.things"], ["tests.support.topic_flows"]
    found = [code_version(each, things).formerly for each in (plain, windows)]
    found += [code_version(each, flows).formerly for each in (copied, total_changes)]
    assert found == ["2-bc876bdde327", "2-95a1490b9700", "2-b211a6da711f", "2-e7fb6f13c80f"]


def test_a_declared_file_has_to_be_there(tmp_path: Path) -> None:
    declare = stream(source=THINGS, sink=DeltaTable("t"), files=["missing.sql"])
    with pytest.raises(
        UsageError, match=r"stream s: its file 'missing.sql' does not exist \(/.*/runtime/missing.sql\)"
    ):
        declare(s)
    with pytest.raises(UsageError, match="its file '../runtime' is a folder"):
        stream(source=THINGS, sink=DeltaTable("t"), files=["../runtime"])(s)
    made = stream(source=THINGS, sink=DeltaTable("t"), files=[Path(__file__).name])(s)
    assert made.files == {Path(__file__).name: Path(__file__).resolve()}
    assert str(Path(__file__).resolve()) in imported_files(made, ())
    assert f"file {Path(__file__).name}" in code_parts(made, ())


def s(things: object) -> object:
    return things


def test_a_function_of_a_shell_and_a_lambda_have_a_version_too() -> None:
    from tests.support.worlds import parity

    space: dict[str, object] = {}
    versions = []
    for body in ("things", "things", "things + 1"):
        exec(textwrap.dedent(f"def made(things): return {body}"), space)
        made = Stream("made", space["made"], parity.sources, parity.sinks)  # type: ignore[arg-type]
        versions.append(code_version(made, ()).hash)
    assert versions[0] == versions[1] != versions[2]
    declare = stream(source=THINGS, sink=DeltaTable("t"), name="s")
    one, other = (
        declare(lambda things: things.select("k")),
        declare(lambda things: things.select("n")),
    )
    assert code_version(one, []) != code_version(other, [])


def test_another_bound_on_event_times_is_another_version_and_the_default_one_is_none() -> None:
    """Code of before there was a bound keeps its version: no savepoint, and nothing to explain."""
    flows = ["tests.support.things"]
    bounded = replace(windows, sources={"things": replace(THINGS, max_ahead="1 hour")})
    assert code_version(bounded, flows).hash != code_version(windows, flows).hash
    assert "1 day" not in repr(_declared(windows, _type)) and "1 hour" in repr(_declared(bounded, _type))
    untimed = replace(plain, sources={"things": replace(THINGS, event_time=None, lateness=None)})
    same = replace(untimed, sources={"things": replace(untimed.sources["things"], max_ahead=None)})
    assert code_version(untimed, flows).hash == code_version(same, flows).hash
