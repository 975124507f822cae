"""`ObjectFiles` in the memory of this process."""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import dataclass, field

from streaming_jobs.storage.object_files import AlreadyThere, Changed, Found, checked, content


@dataclass(frozen=True)
class MemoryFiles:
    """Objects that `below` shares."""

    root: str = ""
    _objects: dict[str, Found] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, name: str) -> Found | None:
        return self._objects.get(self._key(name))

    def create(self, name: str, data: bytes) -> str:
        with self._lock:
            if self._key(name) in self._objects:
                raise AlreadyThere(f"{self.where(name)} exists")
            return self._write(name, data)

    def replace(self, name: str, data: bytes, tag: str) -> str:
        with self._lock:
            there = self._objects.get(self._key(name))
            if there is None or there.tag != tag:
                raise Changed(f"{self.where(name)} has changed, or it is gone")
            return self._write(name, data)

    def put(self, name: str, data: bytes, *, durable: bool = True) -> str:
        with self._lock:
            return self._write(name, data)

    def delete(self, name: str, tag: str | None = None) -> None:
        with self._lock:
            there = self._objects.get(self._key(name))
            if there is not None and tag not in (None, there.tag):
                raise Changed(f"{self.where(name)} has changed")
            self._objects.pop(self._key(name), None)

    def folders(self, prefix: str = "") -> list[str]:
        start = f"{self._key(prefix)}/" if prefix else self.root
        below = (key.removeprefix(start).split("/") for key in list(self._objects) if key.startswith(start))
        return sorted({first for first, *others in below if others})

    def names(self, prefix: str = "") -> list[str]:
        start = f"{self._key(prefix)}/" if prefix else self.root
        return sorted(key.removeprefix(self.root) for key in list(self._objects) if key.startswith(start))

    def below(self, prefix: str) -> MemoryFiles:
        return MemoryFiles(f"{self._key(prefix)}/", self._objects, self._lock)

    def where(self, name: str = "") -> str:
        return f"memory:{self.root}{name}"

    def _key(self, name: str) -> str:
        return self.root + checked(name)

    def _write(self, name: str, data: bytes) -> str:
        tag = uuid.uuid4().hex
        self._objects[self._key(name)] = Found(content(data), tag, time.time())
        return tag
