"""Log lines while no space is left on the disk: they are dropped, and the process continues."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

_FULL = (errno.ENOSPC, errno.EDQUOT)


def disk_is_full(error: OSError) -> bool:
    """True if there is no space on the disk, or none within the user's quota."""
    return error.errno in _FULL


@contextmanager
def dropped_when_full() -> Iterator[None]:
    """Leave out what the block writes to a log if no space is left on its disk; other errors are raised."""
    try:
        yield
    except OSError as error:
        if not disk_is_full(error):
            raise


def log_stream(stream: TextIO) -> TextIO:
    """The stream for log lines: it drops what does not fit on the disk, so that a line never ends the process."""
    return cast("TextIO", _LogStream(stream))


class _LogStream:
    """`write` and `flush` of a text stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write or drop the text; returns its length in both cases."""
        with dropped_when_full():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, as far as the disk has space."""
        with dropped_when_full():
            self._stream.flush()
