"""The code and the settings on disk, compared with those that a session runs.

When a stream has failed and a file has changed, a new process (`--print-versions`) reports the versions that a session
started now would run. Its answer is valid until a file changes again, for every stream that fails meanwhile. Code that
cannot be loaded is ignored. After a recovery only files are compared: a session whose files are unchanged runs the code
that the recovery ran.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO

import structlog

from streaming_jobs.runtime.code_version import imported_files, loaded_code
from streaming_jobs.settings import Settings
from streaming_jobs.stream import Stream

log = structlog.get_logger()

SETTINGS = "settings"
_ANSWER = "versions on disk"
_LOOK_EVERY = 5.0
_DEADLINE = 120.0


def versions(settings: Settings, streams: Iterable[Stream]) -> dict[str, str]:
    """The code of each stream that this process has loaded, and under `settings` a hash of the settings."""
    codes = {f"stream {s.name}": loaded_code(s, settings.flows).hash for s in streams}
    return {**codes, SETTINGS: hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:12]}


def as_line(by_key: Mapping[str, str]) -> str:
    """The `versions` as `--print-versions` prints them: on a separate line, since the user's code may print too."""
    return f"\n{json.dumps({_ANSWER: by_key})}\n"


class CodeWatch:
    """Checks the files behind a session's streams, at most every 5 s. `close` ends a process that still loads them."""

    def __init__(self, command: Sequence[str], settings: Settings, streams: Sequence[Stream], config: Path) -> None:
        """`command` prints the `versions` of the code on disk (`as_line`); the file `config` need not exist."""
        self._command = list(command)
        self._flows = tuple(settings.flows)
        self._config = config
        self._running = versions(settings, streams)
        self._files = self._seen()
        imported = [file for stream in streams for file in imported_files(stream)]
        self._loaded = _stamps([*_files_of(sys.modules.copy()), *imported, config])
        self._looked_at = time.monotonic()
        self._loader: tuple[subprocess.Popen[bytes], IO[bytes], float] | None = None
        self._on_disk: Mapping[str, str] = self._running

    def untouched(self) -> bool:
        """True if no file has changed since the session began: of any module it had loaded, or of the configuration."""
        return _stamps(self._loaded) == self._loaded

    def newer(self, streams: Iterable[str]) -> bool:
        """True if a session started now would run these streams with other code or settings. Does not wait."""
        if self._loader is not None:
            self._collect()
        elif time.monotonic() - self._looked_at >= _LOOK_EVERY:
            self._looked_at = time.monotonic()
            if (files := self._seen()) != self._files:
                self._load(files)
        if self._loader is not None:  # the last answer is out of date
            return False
        return any(
            self._on_disk.get(key) != self._running.get(key) for key in (SETTINGS, *(f"stream {s}" for s in streams))
        )

    def close(self) -> None:
        """End a process that still runs."""
        if self._loader is not None:
            process, output, _ = self._loader
            process.kill()
            process.wait()
            output.close()
            self._loader = None

    def _load(self, files: dict[str, tuple[int, int]]) -> None:
        """Start the process that loads the code on disk; if it cannot be started, the next check tries again."""
        try:
            output = tempfile.TemporaryFile()  # noqa: SIM115 - `_collect` or `close` closes it
            try:
                process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL
                )
            except BaseException:
                output.close()
                raise
        except OSError as error:  # no memory, no descriptor, no space: no reason to end streams that run
            log.warning("the code on disk has changed and could not be checked yet", reason=str(error))
            self._on_disk = self._running
            return
        self._files = files
        self._loader = process, output, time.monotonic() + _DEADLINE

    def _collect(self) -> None:
        """Take the process's answer, if it is complete. Without a usable answer the session keeps its code."""
        assert self._loader is not None
        process, output, deadline = self._loader
        if process.poll() is None:
            if time.monotonic() > deadline:
                self.close()
                self._on_disk = self._running
                self._files = {}  # the next check starts it again
            return
        output.seek(0)
        answer = _answer(output.read().decode(errors="replace"))
        self.close()
        if process.returncode != 0 or answer is None:
            log.warning("the code on disk has changed and cannot be loaded; the session keeps the code that it has")
            answer = None
        self._on_disk = answer if answer is not None else self._running

    def _seen(self) -> dict[str, tuple[int, int]]:
        """Time and size of each file behind the packages that declare streams, and of the configuration file."""
        below = {
            name: module
            for name, module in sys.modules.copy().items()
            if any(name == root or name.startswith(f"{root}.") for root in self._flows)
        }
        return _stamps([*_files_of(below), self._config])


def _files_of(modules: Mapping[str, ModuleType]) -> list[str]:
    return [file for module in modules.values() if (file := getattr(module, "__file__", None))]


def _stamps(paths: Iterable[str | Path]) -> dict[str, tuple[int, int]]:
    """Time of change (ns since 1970) and size of each file; zeros for a missing file."""
    stamps = {}
    for path in paths:
        try:
            stat = Path(path).stat()
        except OSError:  # missing, perhaps only while it is being replaced
            stamps[str(path)] = (0, 0)
        else:
            stamps[str(path)] = (stat.st_mtime_ns, stat.st_size)
    return stamps


def _answer(text: str) -> Mapping[str, str] | None:
    """The versions in the process's output; None if it printed none."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict) and isinstance(value.get(_ANSWER), dict):
                return dict(value[_ANSWER])
    return None
