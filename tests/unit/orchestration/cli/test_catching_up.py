"""The progress of streams towards the end of their topics is shown with real numbers from the first second on."""

from __future__ import annotations

import pytest

from orchestration.cli.progress import Bars, CatchingUp, Rate
from tests.support.life import STREAM, TOPIC

ENDS = {TOPIC: {0: 1_100, 1: 900}}
STARTS = {TOPIC: {0: 100, 1: 0}}


class Disk:
    """A checkpoint that a session moves on."""

    def __init__(self) -> None:
        self.position: dict[str, dict[int, int]] = {}
        self.batch: int | None = None

    def __call__(self, stream: str) -> tuple[dict[str, dict[int, int]], int | None]:
        assert stream == STREAM.name
        return self.position, self.batch


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def ahead(disk: Disk) -> CatchingUp:
    return CatchingUp([STREAM], disk, STARTS, ENDS)


def test_before_the_first_batch_the_lag_is_known_already(ahead: CatchingUp) -> None:
    (standing,) = ahead.look(0.0)
    assert (standing.done, standing.total, standing.batch) == (0, 1_900, None)
    assert str(standing) == "things: 0 of 1,900 records, no batch yet, - records/s, lag 1,900, - left"


def test_the_batch_under_way_is_named_before_it_is_done(disk: Disk, ahead: CatchingUp) -> None:
    disk.batch = 0
    (standing,) = ahead.look(1.0)
    assert (standing.batch, standing.rate, standing.left) == (0, None, None)


def test_with_the_first_batch_there_are_rate_and_remaining_time(disk: Disk, ahead: CatchingUp) -> None:
    ahead.look(0.0)
    disk.batch, disk.position = 1, {TOPIC: {0: 600, 1: 450}}
    (standing,) = ahead.look(5.0)
    assert (standing.done, standing.rate, standing.left) == (950, 190.0, 5.0)
    assert str(standing) == "things: 950 of 1,900 records, batch 1, 190 records/s, lag 950, 5 s left"


def test_a_batch_that_takes_long_makes_the_rate_smaller(disk: Disk, ahead: CatchingUp) -> None:
    ahead.look(0.0)
    disk.batch, disk.position = 1, {TOPIC: {0: 600, 1: 450}}
    ahead.look(5.0)
    (standing,) = ahead.look(10.0)
    assert standing.rate == 95.0


def test_at_the_end_nothing_is_left_whatever_the_rate(disk: Disk, ahead: CatchingUp) -> None:
    disk.batch, disk.position = 1, {TOPIC: {0: 2_000, 1: 2_000}}
    (standing,) = ahead.look(0.0)
    assert (standing.done, standing.total, standing.left) == (1_900, 1_900, 0.0)


def test_the_rate_is_that_of_late() -> None:
    pace = Rate()
    for second in range(100):
        rate = pace.add(float(second), second * (100 if second < 50 else 10))
    assert rate is not None and rate == pytest.approx(10)


def test_without_a_terminal_there_is_a_line_now_and_then_and_at_the_end(
    ahead: CatchingUp, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    with Bars(every=60.0) as bars:
        bars.show(ahead.look(0.0))
        bars.show(ahead.look(1.0))
        disk.batch, disk.position = 0, ENDS
        bars.show(ahead.look(2.0), last=True)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "things: 0 of 1,900 records, no batch yet, - records/s, lag 1,900, - left",
        "things: 1,900 of 1,900 records, batch 0, 950 records/s, lag 0, 0 s left",
    ]


def test_on_a_terminal_there_is_a_bar(
    ahead: CatchingUp, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with Bars() as bars:
        bars.show(ahead.look(0.0))
    assert "0/1900" in capsys.readouterr().err
