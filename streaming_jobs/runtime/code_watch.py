"""The code and the settings on disk, compared with the session's.

When a file has changed, a new process (`--print-versions`) reports the versions that a session started now would run.
Its answer is valid until a file changes again. Code that cannot be loaded is reported, and not used. Before a start in
place only files are compared: a session whose files are unchanged has the code on disk.
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
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO

import structlog

from streaming_jobs.runtime.code_version import imported_files, loaded_code
from streaming_jobs.settings import Settings
from streaming_jobs.stream import Stream

log = structlog.get_logger()

SETTINGS = "settings"
ERROR = "error"
_ANSWER = "versions on disk"
_LOOK_EVERY = 5.0
_DEADLINE = 120.0


@dataclass(frozen=True)
class DiskCode:
    """Code on disk that is not the code that runs: its hash, or the `error` of loading it.

    `settings`: the stream's settings differ too. `since`: the time of the newest file that has changed.
    """

    code: str | None
    settings: bool
    error: str | None
    since: float


def versions(settings: Settings, streams: Iterable[Stream]) -> dict[str, str]:
    """The code of each stream that this process has loaded, its settings, and under `settings` all of them, hashed."""
    by_key = {SETTINGS: _digest(settings.model_dump_json())}
    for stream in streams:
        by_key[f"stream {stream.name}"] = loaded_code(stream, settings.flows).hash
        by_key[f"settings {stream.name}"] = settings_version(settings, stream.name)
    return by_key


def settings_version(settings: Settings, stream: str) -> str:
    """A hash of the settings by which one stream runs."""
    sections = (settings.for_stream(stream), settings.spark, settings.table, settings.kafka, settings.savepoint)
    return _digest("".join(section.model_dump_json() for section in sections))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


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
        self._streams = tuple(streams)
        self._running = versions(settings, streams)
        self._imported = self._imports()
        self._files = self._seen()
        self._loaded = _stamps([*_files_of(sys.modules.copy()), *self._imported, config])
        self._looked_at = time.monotonic()
        self._loader: tuple[subprocess.Popen[bytes], IO[bytes], float] | None = None
        self._on_disk: Mapping[str, str] = self._running
        self._error: str | None = None
        self._since = 0.0
        self.answers = 0

    def untouched(self) -> bool:
        """True if no file has changed since the session began: of any module it had loaded, or of the configuration."""
        return _stamps(self._loaded) == self._loaded

    def newer(self, streams: Iterable[str]) -> bool:
        """True if a session started now would run these streams with other code or settings. Does not wait."""
        self._look()
        if self._loader is not None:  # the last answer is out of date
            return False
        return any(
            self._on_disk.get(key) != self._running.get(key) for key in (SETTINGS, *(f"stream {s}" for s in streams))
        )

    def on_disk(self, stream: str) -> DiskCode | None:
        """The stream's code and settings on disk, by the last answer; None if they equal the running ones."""
        self._look()
        if self._error is not None:
            return DiskCode(None, False, self._error, self._since)
        code, settings = f"stream {stream}", f"settings {stream}"
        other_code = self._on_disk.get(code) != self._running.get(code)
        other_settings = self._on_disk.get(settings) != self._running.get(settings)
        if not (other_code or other_settings):
            return None
        return DiskCode(self._on_disk.get(code) if other_code else None, other_settings, None, self._since)

    def close(self) -> None:
        """End a process that still runs."""
        if self._loader is not None:
            process, output, _ = self._loader
            process.kill()
            process.wait()
            output.close()
            self._loader = None

    def _look(self) -> None:
        """Take the answer of the process that loads the code, or start it if a file has changed; every 5 s."""
        if self._loader is not None:
            self._collect()
        elif time.monotonic() - self._looked_at >= _LOOK_EVERY:
            self._looked_at = time.monotonic()
            if (files := self._seen()) != self._files:
                self._load(files)

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
        changed = [stamp[0] for file, stamp in files.items() if stamp != self._files.get(file)]
        self._since = max(changed, default=0) / 1e9 or time.time()
        with suppress(SyntaxError, OSError):  # the process reports it; the files of before are checked meanwhile
            self._imported = self._imports()
        self._files = {file: files.get(file, stamp) for file, stamp in self._seen().items()}
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
        self._error = None
        if process.returncode != 0 or answer is None:
            self._error = (answer or {}).get(ERROR) or f"loading it ended with exit code {process.returncode}"
            event = "the code on disk has changed and cannot be loaded; the session keeps the code that it has"
            log.warning(event, reason=self._error)
            answer = None
        else:
            self.answers += 1
        self._on_disk = answer if answer is not None else self._running

    def _seen(self) -> dict[str, tuple[int, int]]:
        """Time and size of each file behind the streams and their packages, and of the configuration file."""
        below = {
            name: module
            for name, module in sys.modules.copy().items()
            if any(name == root or name.startswith(f"{root}.") for root in self._flows)
        }
        return _stamps([*_files_of(below), *self._imported, self._config])

    def _imports(self) -> list[str]:
        return sorted({file for stream in self._streams for file in imported_files(stream, self._flows)})


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
