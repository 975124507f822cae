"""The Java of this machine. Spark 4.2 and the broker need 17 or 21; none is shipped with Recourse."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from streaming_jobs.errors import SetupError

SUPPORTED = (17, 21)
INSTALL = "install Java 17 or 21 (a package such as openjdk-17-jre-headless, temurin or corretto) and set JAVA_HOME"
_ASK_SECONDS = 20.0


def executable() -> Path:
    """The `java` that is used: the one of JAVA_HOME, else the first on PATH; raises SetupError if there is none."""
    home = os.environ.get("JAVA_HOME")
    if home:
        path = Path(home) / "bin" / "java"
        if not os.access(path, os.X_OK):
            raise SetupError(f"JAVA_HOME is {home}, and there is no bin/java in it", f"correct JAVA_HOME, or {INSTALL}")
        return path
    first_on_path = shutil.which("java")
    if first_on_path is None:
        raise SetupError("there is no java on PATH, and JAVA_HOME is not set", INSTALL)
    return Path(first_on_path)


def version(java: Path) -> str:
    """The version that `java -version` prints, such as `17.0.15`; raises SetupError if it does not run."""
    try:
        answer = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=_ASK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{java} does not run: {error}", INSTALL) from error
    match = re.search(r'version "([^"]+)"', answer.stderr + answer.stdout)
    if match is None:
        raise SetupError(f"{java} -version prints no version (exit code {answer.returncode})", INSTALL)
    return match[1]


def major(version: str) -> int:
    """17 for `17.0.15`, 8 for `1.8.0_442`."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]
