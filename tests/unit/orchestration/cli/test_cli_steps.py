"""Whatever was started is ended, in the opposite order, at once when asked twice."""

from __future__ import annotations

import pytest

from orchestration.cli.children import Steps


def interrupt() -> None:
    raise KeyboardInterrupt


def test_steps_end_last_one_first() -> None:
    done: list[str] = []
    with Steps() as steps:
        steps.add("broker", lambda: done.append("broker"))
        steps.add("streams", lambda: done.append("streams"))
    assert done == ["streams", "broker"]


def test_steps_end_after_an_error_and_the_error_is_kept() -> None:
    done: list[str] = []
    with pytest.raises(RuntimeError, match="in the block"), Steps() as steps:
        steps.add("broker", lambda: done.append("broker"))
        raise RuntimeError("in the block")
    assert done == ["broker"]


def test_a_second_interrupt_kills_the_step_it_met_and_all_that_remain() -> None:
    done: list[str] = []
    with Steps() as steps:
        steps.add("broker", lambda: done.append("broker stopped"), lambda: done.append("broker killed"))
        steps.add("streams", interrupt, lambda: done.append("streams killed"))
        steps.add("feeder", lambda: done.append("feeder stopped"))
    assert done == ["feeder stopped", "streams killed", "broker killed"]


def test_a_failing_stop_keeps_nothing_from_being_stopped_and_is_told() -> None:
    done: list[str] = []

    def fail() -> None:
        raise RuntimeError("will not end")

    with pytest.raises(RuntimeError, match="will not end"), Steps() as steps:
        steps.add("broker", lambda: done.append("broker"))
        steps.add("streams", fail)
    assert done == ["broker"]
