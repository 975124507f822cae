"""Processors with timers of the wall clock: a run over what there is ends, although Spark plans batches for ever."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.support.driver import Bench, produce, rows
from tests.support.tick_flows import counted


@pytest.fixture
def made(bench: Callable[..., Bench]) -> Iterator[Bench]:
    made = bench()
    made.topics.create("ticks", 1)
    yield made
    made.topics.delete("ticks")


def read(made: Bench, sent: int) -> list[int]:
    """Send ticks, and read them in a run that has to end; the counts in the table."""
    produce(made.bootstrap, "ticks", [(None, b'{"k": "a"}')] * sent)
    ended = made.finish(made.start(counted), seconds=90)
    assert ended.status.error is None and ended.status.state == "stopped"
    return sorted(row["n"] for row in rows(made.settings, "counted"))


@pytest.mark.long
def test_runs_over_what_there_is_end_and_so_does_their_replay(made: Bench) -> None:
    assert read(made, 2) == [2], "the timer that was due has fired"
    assert read(made, 1) == [2, 3], "the run begins with the batch that the last one had planned"
    recourse = partial(made.recourse, "tests.support.tick_flows")

    plan = ("recover", "plan", "counted", "--to-batch", "-1", "--max-changed", "100%", "--output", "json")
    recourse("recover", "apply", json.loads(recourse(*plan))["id"], "--yes")
    assert rows(made.settings, "counted")[-1]["n"] == 3
    assert read(made, 1)[-1] == 4, "and the stream goes on"
