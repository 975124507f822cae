"""The code and the settings on disk, compared with those that a session runs.

For a stream that has failed, a file that changed is a hint, and a fresh process (`--print-versions`) says what a
session started now would run. Its answer holds until a file changes again, whichever stream fails meanwhile. Code that
cannot be loaded is not taken up. After a recovery only files are compared: a session whose files are those on disk
runs the code that the recovery ran.
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
    found = {f"stream {s.name}": loaded_code(s, settings.flows).hash for s in streams}
    return {**found, SETTINGS: hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:12]}


def as_line(found: Mapping[str, str]) -> str:
    """The `versions` as `--print-versions` prints them: a line of its own, whatever the user's code prints too."""
    return f"\n{json.dumps({_ANSWER: found})}\n"


class CodeWatch:
    """Looks now and then at the files behind a session's streams. `close` ends a process that still loads them."""

    def __init__(self, command: Sequence[str], settings: Settings, streams: Sequence[Stream], config: Path) -> None:
        """`command` prints the `versions` of what is on disk (`as_line`); `config` may not be there."""
        self._command = list(command)
        self._flows = tuple(settings.flows)
        self._config = config
        self._running = versions(settings, streams)
        self._files = self._seen()
        imported = [file for stream in streams for file in imported_files(stream)]
        self._loaded = _stamps([*_files_of(sys.modules.copy()), *imported, config])
        self._looked_at = time.monotonic()
        self._asked: tuple[subprocess.Popen[bytes], IO[bytes], float] | None = None
        self._found: Mapping[str, str] = self._running

    def untouched(self) -> bool:
        """True if no file has changed since the session began: of any module it had loaded, or of the configuration."""
        return _stamps(self._loaded) == self._loaded

    def newer(self, streams: Iterable[str]) -> bool:
        """True if these streams, or the settings, would be others in a session started now. Does not wait."""
        if self._asked is not None:
            self._collect()
        elif time.monotonic() - self._looked_at >= _LOOK_EVERY:
            self._looked_at = time.monotonic()
            if (files := self._seen()) != self._files:
                self._ask(files)
        if self._asked is not None:  # what was found before is out of date
            return False
        return any(
            self._found.get(key) != self._running.get(key) for key in (SETTINGS, *(f"stream {s}" for s in streams))
        )

    def close(self) -> None:
        """End what still runs."""
        if self._asked is not None:
            process, output, _ = self._asked
            process.kill()
            process.wait()
            output.close()
            self._asked = None

    def _ask(self, files: dict[str, tuple[int, int]]) -> None:
        """Start the process that tells; one that cannot be started now is tried again at the next look."""
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
            log.warning("the code on disk has changed and could not be looked at yet", reason=str(error))
            self._found = self._running
            return
        self._files = files
        self._asked = process, output, time.monotonic() + _DEADLINE

    def _collect(self) -> None:
        """Take the answer, if it is there. Without a usable one the session keeps the code that it has."""
        assert self._asked is not None
        process, output, deadline = self._asked
        if process.poll() is None:
            if time.monotonic() > deadline:
                self.close()
                self._found = self._running
                self._files = {}  # asked again at the next look
            return
        output.seek(0)
        found = _answer(output.read().decode(errors="replace"))
        self.close()
        if process.returncode != 0 or found is None:
            log.warning("the code on disk has changed and cannot be loaded; the session keeps the code that it has")
            found = None
        self._found = found if found is not None else self._running

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
    """Time of change (ns since 1970) and size of each file; zeros for one that is not there."""
    found = {}
    for path in paths:
        try:
            stat = Path(path).stat()
        except OSError:  # away, perhaps for the moment in which it is replaced
            found[str(path)] = (0, 0)
        else:
            found[str(path)] = (stat.st_mtime_ns, stat.st_size)
    return found


def _answer(text: str) -> Mapping[str, str] | None:
    """The versions in what the process printed; None if it has not said them."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            said = json.loads(line)
            if isinstance(said, dict) and isinstance(said.get(_ANSWER), dict):
                return dict(said[_ANSWER])
    return None
