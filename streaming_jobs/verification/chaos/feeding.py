"""The feeder of the kill loop: real flights at a steady rate in a thread, through every restart of the broker.

A burst is fed at full speed, and the steady rate continues after it.
"""

from __future__ import annotations

import threading
import time

import numpy as np

from streaming_jobs.errors import TransientError
from streaming_jobs.examples.flights import dataset
from streaming_jobs.examples.flights.feeder import CHUNK, feed, survey
from streaming_jobs.settings import Settings

_AGAIN_AFTER = 0.5
_CHUNK = 50
_LOOK_EVERY = 0.05


class Feeding:
    """Feeds until it is stopped. `held` flights are in the topic, always the first ones in order of departure."""

    def __init__(self, settings: Settings, *, rate: float, records: int) -> None:
        """`rate` is in records per second; `records` is the most that it sends."""
        self.held = 0
        self._settings, self._rate = settings, rate
        self._most = min(max(records, 1), dataset.TOTAL)
        self._ended = threading.Event()
        self._cut = threading.Event()
        self._burst_to = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raise the feeder's error, if it has failed."""
        if self._error is not None:
            raise self._error

    @property
    def dry(self) -> bool:
        """True if it has sent all its records."""
        return self.held >= self._most

    def stop(self) -> None:
        """End between two chunks."""
        self._ended.set()
        self._cut.set()
        if self._thread.is_alive():
            self._thread.join()

    def burst(self, records: int, seconds: float) -> int:
        """Feed this many records at once; returns the number of flights in the topic then, after `seconds` at most.

        Raises the feeder's error, and TransientError.
        """
        self._burst_to = target = min(self.held + records, self._most)
        self._cut.set()
        deadline = time.monotonic() + seconds
        while self.held < target:
            self.check()
            if time.monotonic() > deadline:
                raise TransientError(
                    f"{self.held:,} of {target:,} flights are in the topic after {seconds:.0f} s", "check the broker"
                )
            time.sleep(_LOOK_EVERY)
        return self.held

    def finish(self) -> int:
        """Stop, and send the rest of an interrupted chunk; returns the number of flights that the topic then holds."""
        self.stop()
        self.check()
        there = np.ones(dataset.TOTAL, dtype=bool)
        there[survey(self._settings).missing] = False
        count = int(np.flatnonzero(there)[-1]) + 1 if there.any() else 0
        if not there[:count].all():
            feed(self._settings, rate=None, share=count / dataset.TOTAL)
        self.held = count
        return count

    def _run(self) -> None:
        while not self._ended.is_set() and not self.dry:
            self._cut.clear()
            if self._ended.is_set():  # between the two lines above
                return
            burst = self._burst_to > self.held
            try:
                report = feed(
                    self._settings,
                    rate=None if burst else self._rate,
                    share=(self._burst_to if burst else self._most) / dataset.TOTAL,
                    progress=self._progressed,
                    stop=self._cut,
                    chunk=CHUNK if burst else _CHUNK,
                )
                self.held = report.held
            except TransientError:  # the broker is being restarted
                self._ended.wait(_AGAIN_AFTER)
            except Exception as error:  # noqa: BLE001 - raised by `check` in the caller's thread
                self._error = error
                return

    def _progressed(self, held: int, _: int) -> None:
        self.held = held
