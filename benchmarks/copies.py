"""The stateless work several times, as streams of their own on one topic: for `benchmarks.streams_per_session`."""

from __future__ import annotations

from benchmarks.measuring import named
from benchmarks.speed.flows import stateless

MOST = 8
globals().update({f"copy_{number}": named(stateless, f"copy_{number}") for number in range(MOST)})
