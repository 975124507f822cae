"""Class-data archives: named after the Java and the jars they were made with, used only where they exist, bounded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from streaming_jobs import warm_up
from streaming_jobs.errors import SetupError
from streaming_jobs.platform import class_data
from streaming_jobs.settings import Settings

JARS = [Path("/cache/a-1.jar"), Path("/cache/b-1.jar")]


@pytest.fixture
def home_settings(settings: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    use_java(tmp_path / "java", monkeypatch)
    return settings({"jars_dir": tmp_path / "cache" / "jars"})


def use_java(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text("#!/bin/sh\n")
    (home / "bin" / "java").chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(home))


def test_other_jars_another_kind_or_another_java_have_an_archive_of_their_own(
    home_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = class_data.archive(home_settings, "spark", JARS)
    assert first == class_data.archive(home_settings, "spark", JARS)
    assert first.parent == tmp_path / "cache" / "class-data"
    others = {class_data.archive(home_settings, "broker", JARS), class_data.archive(home_settings, "spark", JARS[:1])}
    use_java(tmp_path / "other", monkeypatch)
    others.add(class_data.archive(home_settings, "spark", JARS))
    assert len(others | {first}) == 4


def test_a_jvm_is_told_of_an_archive_only_where_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / "spark-1.jsa"
    assert class_data.reading(file) == []
    file.touch()
    assert class_data.reading(file)[0] == f"-XX:SharedArchiveFile={file}"


def test_the_newest_three_of_each_kind_are_kept(home_settings: Settings) -> None:
    folder = class_data.folder(home_settings)
    folder.mkdir(parents=True)
    for age in range(5):
        for kind in ("spark", "broker"):
            file = folder / f"{kind}-{age}.jsa"
            file.touch()
            os.utime(file, (1000 - age, 1000 - age))
    class_data.discard_old(home_settings)
    assert sorted(file.name for file in folder.iterdir()) == [
        f"{kind}-{age}.jsa" for kind in ("broker", "spark") for age in range(3)
    ]


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
    assert sorted(spark.parent.glob("*.jsa")) == sorted((spark, broker))
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
