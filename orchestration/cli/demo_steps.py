"""The steps of a demonstration: real commands on a home of its own, and a module whose code is changed on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestration.cli.output import say
from streaming_jobs.errors import PermanentError

if TYPE_CHECKING:
    from streaming_jobs.settings import Settings

_DEADLINE = 300.0


class Steps:
    """A home in `folder` with the flows module `module`, a copy of `source` in which the text `right` is replaced."""

    def __init__(self, folder: Path, settings: Settings, bootstrap: str, module: str, source: Path, right: str) -> None:
        self.folder, self.settings, self.bootstrap, self.right = folder, settings, bootstrap, right
        self.streams: Sequence[str] = ()
        self.suites: Sequence[str] = ()
        self.module, self.text = module, source.read_text(encoding="utf-8")
        self.code = folder / "code" / f"{module}.py"
        self.code.parent.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()

    def deploy(self, change: str) -> None:
        """Write another version of the function into the module from which the streams are imported."""
        text = self.text.replace(self.right, change)
        if text == self.text and change != self.right:
            raise PermanentError("the line to change is not in the flows")
        self.code.write_text(text, encoding="utf-8")
        self.say(f"  {self.code.name}: {change}")

    def run_streams(self, names: Sequence[str] = ()) -> None:
        """Run streams, by default all, until they have read everything."""
        self.recourse("streams", "run", *(names or self.streams), "--trigger", "available-now", quiet=True)

    def rows(self, table: str) -> list[dict[str, Any]]:
        """A table's rows."""
        from streaming_jobs.platform.table_rows import rows

        return list(rows(self.settings.tables / table).to_pylist())

    def recourse(self, *arguments: str, quiet: bool = False, code: int = 0) -> str:
        """Run a command as a person would, show its output unless `quiet`, and return its stdout.

        Raises PermanentError if it ends with another exit code than `code`.
        """
        self.say(f"$ recourse {' '.join(_shown(a) for a in arguments)}")
        done = subprocess.run(
            [sys.executable, "-m", "orchestration.cli", *arguments],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=_DEADLINE,
            check=False,
        )
        if done.returncode != code:
            raise PermanentError(f"it ended with {done.returncode}: {done.stderr[-2000:]}{done.stdout[-500:]}")
        if not quiet:
            messages = [line for line in done.stderr.splitlines() if not line.startswith(("timestamp=", "WARNING"))]
            for line in (*messages, *done.stdout.splitlines()):
                say(f"  {line}")
        return done.stdout

    def environment(self) -> dict[str, str]:
        """The environment of the commands."""
        source = Path(__file__).resolve().parents[2]
        paths = [str(self.code.parent), str(source), os.environ.get("PYTHONPATH", "")]
        settings = {
            "RECOURSE_HOME": str(self.folder),
            "RECOURSE_FLOWS": json.dumps([self.module]),
            "RECOURSE_QUALITY__SUITES": json.dumps([*self.suites]),
            "RECOURSE_KAFKA__BOOTSTRAP_SERVERS": self.bootstrap,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        if self.settings.jars_dir is not None:
            settings["RECOURSE_JARS_DIR"] = str(self.settings.jars_dir)
        if self.settings.java_home is not None:
            settings["RECOURSE_JAVA_HOME"] = str(self.settings.java_home)
        return {**os.environ, **settings}

    def say(self, text: str) -> None:
        """Print a line with the seconds since the story began."""
        say(f"[{time.monotonic() - self.began:5.1f} s] {text}")


def _shown(argument: str) -> str:
    return f"'{argument}'" if " " in argument else argument
