"""A thread beside the sessions that are killed: it feeds a topic, or reads what the streams write."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod


class Background(ABC):
    """Work in a thread from `start` to `stop`; `check` raises the error that ended it."""

    def __init__(self, name: str) -> None:
        self.ended = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def work(self) -> None:
        """Work until `ended` is set."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the work where nothing is half done, and wait for that."""
        self.ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def check(self) -> None:
        """Raise, in the caller's thread, the error that ended the work."""
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self.work()
        except Exception as error:  # noqa: BLE001 - raised by `check`
            self.error = error
