"""The doctor names every fault, each with its fix."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streaming_jobs.platform import java, ports
from streaming_jobs.platform.jars import Jar
from streaming_jobs.preflight import doctor
from streaming_jobs.preflight.doctor import DoctorCheck, checks
from streaming_jobs.settings import Settings
from tests.conftest import SettingsFactory


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which this process listens."""
    with socket.socket() as other:
        other.bind((ports.HOST, 0))
        other.listen()
        yield other.getsockname()[1]


def java_that_says(folder: Path, text: str) -> Path:
    home = folder / "java"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text(f"#!/bin/sh\necho '{text}' >&2\n")
    (home / "bin" / "java").chmod(0o755)
    return home


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ('openjdk version "17.0.15" 2025-04-15', True),
        ('openjdk version "21.0.5" 2024-10-15', True),
        ('openjdk version "25" 2025-09-16', True),
        ('java version "1.8.0_442"', False),
        ('openjdk version "11.0.2" 2019-01-15', False),
        ('openjdk version "24.0.1" 2025-04-15', False),
        ("Error: could not find libjava.so", False),
    ],
)
def test_java_has_to_be_17_or_21_or_25(settings: SettingsFactory, tmp_path: Path, text: str, ok: bool) -> None:
    check = doctor.check_java(settings({"java_home": java_that_says(tmp_path, text)}))
    assert check.ok is ok
    assert ok or java.INSTALL in check.fix


def test_the_java_is_named_with_its_version_and_its_origin(settings: SettingsFactory, tmp_path: Path) -> None:
    home = java_that_says(tmp_path, 'openjdk version "17.0.15" 2025-04-15')
    check = doctor.check_java(settings({"java_home": home}))
    assert check.found == f"17.0.15 of setting java_home ({home}/bin/java)"


def test_a_java_that_has_a_version_and_does_not_run_is_a_fault(settings: SettingsFactory, tmp_path: Path) -> None:
    home = java_that_says(tmp_path, "cannot execute binary file")
    (home / "release").write_text('JAVA_VERSION="25.0.2"\n')
    check = doctor.check_java(settings({"java_home": home}))
    assert (check.ok, "prints no version" in check.found) == (False, True)


def test_a_java_home_without_java_is_named(settings: SettingsFactory, tmp_path: Path) -> None:
    check = doctor.check_java(settings({"java_home": tmp_path}))
    assert (check.ok, str(tmp_path) in check.found, "java_home" in check.fix) == (False, True, True)


@pytest.mark.parametrize(
    ("version", "ok"), [((3, 10, 9), False), ((3, 11, 0), True), ((3, 13, 4), True), ((3, 14, 0), False)]
)
def test_python_has_to_be_3_11_to_3_13(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], ok: bool
) -> None:
    class Version(tuple[int, ...]):
        major, minor, micro = version

    monkeypatch.setattr(sys, "version_info", Version(version))
    assert doctor.check_python().ok is ok


def test_packages_as_pinned_are_fine_and_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "requires", lambda _: ["jgo==4.2.0", "pyspark==4.2.0", "rich>=14"])
    monkeypatch.setattr(doctor, "version", lambda _: "4.2.0")
    assert doctor.check_packages() == DoctorCheck("packages", True, "pyspark 4.2.0, 1 more as pinned")
    pins = ["pyspark==4.2.0", "deltalake==1.6.6", "numpy>=2", "gone==1.0", "dagster==1.13.27 ; python_version > '3'"]
    versions = {"pyspark": "4.2.0", "deltalake": "1.6.5", "dagster": "1.13.27"}

    def version(name: str) -> str:
        if name not in versions:
            raise doctor.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor, "requires", lambda _: pins)
    monkeypatch.setattr(doctor, "version", version)
    check = doctor.check_packages()
    assert check.ok is False
    assert check.found == "deltalake is 1.6.5, 1.6.6 is pinned; gone is missing, 1.0 is pinned"
    assert "make setup" in check.fix


@pytest.mark.parametrize(("content", "ok"), [(b"jar", True), (b"jbr", False), (None, None)])
def test_jars_are_missing_damaged_or_fine(
    settings: Callable[..., Settings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
    ok: bool | None,
) -> None:
    wanted = Jar("spark", "org.example", "one", "1.0", 3, hashlib.sha256(b"jar").hexdigest())
    monkeypatch.setattr(doctor, "locked", lambda _: [wanted])
    if content is not None:
        (tmp_path / wanted.file).write_bytes(content)
    check = doctor.check_jars(settings({"jars_dir": tmp_path}), "spark")
    assert check.ok is ok
    assert ok or check.fix
    assert ok is not False or str(tmp_path / wanted.file) in check.found


def test_a_taken_ui_or_broker_port_is_told_with_who_has_it_and_a_free_one_is_fine(
    settings: Callable[..., Settings], taken: int
) -> None:
    check = doctor.check_ui_port(settings({"dagster.port": taken}))
    assert (check.ok, str(os.getpid()) in check.found, "--port 0" in check.fix) == (False, True, True)
    check = doctor.check_broker(settings({"broker.port": taken}))
    assert (check.ok, str(os.getpid()) in check.found, "RECOURSE_BROKER__PORT" in check.fix) == (False, True, True)
    assert doctor.check_ui_port(settings({"dagster.port": ports.free_port()})).ok is True
    assert doctor.check_ui_port(settings({"dagster.port": 0})).ok is True


def test_our_own_ui_on_its_port_is_fine(
    settings: Callable[..., Settings], taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Process:
        pid = 1

        def name(self) -> str:
            return "python"

        def environ(self) -> dict[str, str]:
            return {"DAGSTER_HOME": str(home)}

    made = settings({"dagster.port": taken})
    home = made.dagster_home
    monkeypatch.setattr(doctor.ports, "listener", lambda _: Process())
    assert doctor.check_ui_port(made).ok is True
    home = home / "another"
    assert doctor.check_ui_port(made).ok is False


def test_a_configured_cluster_needs_no_broker_jars_and_is_told_in_seconds_if_it_does_not_answer(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_ASK", doctor.timedelta(seconds=0.5))
    check = doctor.check_cluster(settings({"kafka.bootstrap_servers": f"{ports.HOST}:{ports.free_port()}"}))
    assert check.ok is False
    assert check.fix
    monkeypatch.setattr(doctor, "check_cluster", lambda _: DoctorCheck("broker", True, "answers"))
    names = [check.name for check in checks(settings({"kafka.bootstrap_servers": "kafka.example:9092"}))]
    assert "jars (broker)" not in names
    assert "jars (spark)" in names


def test_little_room_is_a_warning_and_a_folder_that_cannot_be_written_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor.check_folder("home", tmp_path / "not" / "yet", 0).ok is True
    assert doctor.check_folder("home", tmp_path, 10**9).ok is None
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert doctor.check_folder("home", tmp_path, 0).ok is False
    assert not list(tmp_path.iterdir())


def test_each_fault_and_warning_has_a_fix_and_looking_changes_nothing(
    settings: Callable[..., Settings], tmp_path: Path, taken: int
) -> None:
    made = settings({"jars_dir": tmp_path / "jars", "broker.port": taken, "dagster.port": taken})
    results = checks(made)
    assert [check.name for check in results if check.ok is False] == ["broker", "UI port"]
    assert all(check.fix for check in results if not check.ok)
    assert not list(tmp_path.iterdir())
