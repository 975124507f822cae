"""Commands of a test run start warm: their Python has its imports done, and the JVM of their Spark runs already.

A command is a process of its own all the same, with its arguments, environment, folder, output and exit code. It finds
the JVM as under spark-submit and makes a Spark context of its own there, so one command after the other may use it. A
command that is to be killed starts cold (`driver.command`), and so does every session that a test starts by hand: those
have a JVM that ends with them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from streaming_jobs.platform import spark, spark_jvm
from streaming_jobs.platform.processes import forks
from streaming_jobs.settings import Settings
from tests.support.warm_python import COMMAND


@dataclass
class Warm:
    """A fork server and a JVM in `folder`, both started when the first command needs them."""

    folder: Path
    settings: Settings
    _opened: ExitStack = field(default_factory=ExitStack, init=False)
    _python: Path | None = field(default=None, init=False)
    _jvm: spark_jvm.Gateway | None = field(default=None, init=False)

    def run(
        self, folder: Path, environment: Mapping[str, str], *arguments: str, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run `recourse` in a folder; its Spark, if it uses any, is one in the JVM that is there."""
        python, jvm = self._started()
        gateway = {"PYSPARK_GATEWAY_PORT": str(jvm.port), "PYSPARK_GATEWAY_SECRET": jvm.secret}
        try:
            return subprocess.run(
                [str(python), "-m", COMMAND, *arguments],
                cwd=folder,
                env={**environment, **gateway},
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except BaseException:
            self.close()  # its Spark context may be left in the JVM
            raise

    def close(self) -> None:
        """End both; the next command starts others."""
        self._opened.close()
        self._python = self._jvm = None

    def _started(self) -> tuple[Path, spark_jvm.Gateway]:
        if self._python is None or self._jvm is None or self._jvm.process.poll() is not None:
            self.close()
            self._jvm = self._start_jvm()
            self._python = self._start_python()
        return self._python, self._jvm

    def _start_python(self) -> Path:
        server = forks.start(self.folder, server=("tests.support.warm_python", str(self.folder / "python")))
        assert server is not None
        self._opened.callback(server.close)
        return server.executable

    def _start_jvm(self) -> spark_jvm.Gateway:
        """A JVM as a session starts it, without a Spark context: whoever connects makes one."""
        launched = spark.launch(self.settings, name="warm")
        self._opened.callback(launched.kill)
        assert launched.jvm is not None
        return launched.jvm.answer()
