"""A session that is being started, with another process in the place of its JVM."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def launched(process: subprocess.Popen[bytes] | None, stop: Callable[[], object]) -> Any:
    """As `streaming_jobs.platform.spark.Launched`; `stop` is that of its session."""

    def kill() -> None:
        if process is not None:
            process.kill()
            process.wait(10)

    return SimpleNamespace(process=process, session=lambda: SimpleNamespace(stop=stop), kill=kill)
