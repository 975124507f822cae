"""A warm-up that could not be done says why, and is tried once more where that may help."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from streaming_jobs import warm_up
from streaming_jobs.errors import SetupError, TransientError
from streaming_jobs.platform import class_data
from tests.conftest import SettingsFactory


@pytest.fixture
def finals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The paths of the archives."""
    for variable in ("SPARK_CONF_DIR", "HADOOP_CONF_DIR"):
        monkeypatch.delenv(variable, raising=False)
    paths = tmp_path / "spark-1.jsa", tmp_path / "broker-1.jsa"
    monkeypatch.setattr(warm_up, "archives", lambda _: paths)
    monkeypatch.setattr(class_data, "folder", lambda _: tmp_path)
    return paths


@pytest.fixture
def warmed_up(
    settings: SettingsFactory, finals: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """Rehearse with JVMs that end with these codes, in order, and write archives from that try on; the tries."""

    def rehearse(*codes: int, write_from: int = 99) -> int:
        tries: list[int] = []

        def run(_: object, *new: Path) -> tuple[int, int]:
            tries.append(1)
            if len(tries) >= write_from:
                for file in new:
                    file.write_bytes(b"classes")
            return codes[min(len(tries), len(codes)) - 1], 143

        monkeypatch.setattr(warm_up, "_run", run)
        warm_up.warm_up(settings())
        return len(tries)

    return rehearse


def test_a_jvm_that_was_too_slow_is_told_as_that_after_a_second_try_which_may_succeed(
    warmed_up: Callable[..., int], finals: tuple[Path, Path]
) -> None:
    with pytest.raises(TransientError, match="had not written the archive spark-1.jsa 240 s after") as failed:
        warmed_up(-9)
    assert "SPARK_CONF_DIR" not in str(failed.value) and "less busy" in failed.value.next_step
    assert warmed_up(-9, 0, write_from=2) == 2
    assert all(final.read_bytes() == b"classes" for final in finals)


def test_how_java_ended_is_told_and_a_folder_on_the_class_path_is_blamed_only_if_there_is_one(
    warmed_up: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SetupError, match=r"did not write the archive spark-1.jsa: ended by signal 6 \(SIGABRT\)"):
        warmed_up(-6)
    with pytest.raises(SetupError) as failed:
        warmed_up(0)
    assert "CONF_DIR" not in str(failed.value)
    monkeypatch.setenv("SPARK_CONF_DIR", "/etc/spark")
    with pytest.raises(SetupError, match="SPARK_CONF_DIR on the class path may prevent it"):
        warmed_up(0)


def test_what_java_printed_is_told_without_the_class_path(tmp_path: Path) -> None:
    printed = tmp_path / "spark.out"
    printed.write_text("Picked up JAVA_TOOL_OPTIONS: -Djava.class.path=/a.jar:/b.jar\nno room on the disk\n")
    with pytest.raises(SetupError) as failed:
        warm_up._keep(tmp_path / "unwritten.aot", tmp_path / "spark-1.aot", 1, warm_up._last_words(printed))
    assert failed.value.found == "Java did not write the archive spark-1.aot: exit code 1: no room on the disk"


def test_more_is_rehearsed_where_java_keeps_profiles_of_it() -> None:
    assert warm_up.share(Path("spark-1.aot")) > 10 * warm_up.share(Path("spark-1.jsa"))


def test_each_step_is_printed_at_once_and_again_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "_REPEAT_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", errors := io.StringIO())
    with warm_up._progress() as at:
        at("1 of 2: one")
        at("2 of 2: two")
        while "two (" not in errors.getvalue():
            time.sleep(0.01)
    printed = errors.getvalue()
    assert "warm-up: 1 of 2: one\n" in printed and printed.index("one") < printed.index("2 of 2: two")


def test_an_interrupt_says_what_comes_next(
    settings: SettingsFactory,
    finals: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(warm_up, "_run", interrupted)
    assert warm_up.main() == 130
    assert "interrupted; the next" in capsys.readouterr().err
