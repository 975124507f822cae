"""A disk that can be filled up: a tmpfs of a few MB, mounted for one test.

The kernel itself says ENOSPC there. Root mounts it as it is. Anybody else mounts it in a user namespace (`unshare`),
where a process may mount for itself: the driver is then started inside of that namespace (`nsenter`), and the test
reaches the same files through `/proc/<pid>/root`.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_BLOCK = 1 << 16


@dataclass(frozen=True)
class SmallDisk:
    """`inside` is its folder as the driver sees it, `outside` as the test does; `prefix` starts a command inside."""

    inside: Path
    outside: Path
    prefix: tuple[str, ...] = ()

    @property
    def _ballast(self) -> Path:
        return self.outside / "ballast"

    def fill(self) -> None:
        """Write until the kernel says that no space is left."""
        descriptor = os.open(self._ballast, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            for size in (_BLOCK, 1):
                while True:
                    os.write(descriptor, bytes(size))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        finally:
            os.close(descriptor)

    def read_only(self) -> None:
        """From now on nothing can be written there."""
        subprocess.run([*self.prefix, "mount", "-o", "remount,ro", str(self.inside)], check=True, capture_output=True)

    def free(self) -> None:
        """Give the space back."""
        self._ballast.unlink()


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[SmallDisk]:
    """Mount one on the folder, and take it away again."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=700", "tmpfs", str(folder)]
    if os.geteuid() == 0 and subprocess.run(mount, check=False, capture_output=True).returncode == 0:
        try:
            yield SmallDisk(folder, folder)
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        return
    script = '"$@" && echo mounted && exec cat'  # lives until its standard input ends, with us at the latest
    with subprocess.Popen(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", *mount],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        try:
            answer = holder.stdout.readline()
            if answer != "mounted\n":
                pytest.skip(
                    f"neither root nor a user namespace may mount a small disk here: {answer}{holder.stdout.read()}"
                )
            enter = ("nsenter", "--target", str(holder.pid), "--user", "--mount", "--preserve-credentials")
            yield SmallDisk(folder, Path(f"/proc/{holder.pid}/root{folder}"), enter)
        finally:
            holder.stdin.close()
