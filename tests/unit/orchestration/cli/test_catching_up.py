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


HALF: dict[str, dict[int, int]] = {TOPIC: {0: 600, 1: 450}}
WALK = {
    "before the first batch the lag is known already": (
        [(0.0, None, {})],
        "things: 0 of 1,900 records, no batch yet, - records/s, lag 1,900, - left",
    ),
    "the batch under way is named before it is done": (
        [(1.0, 0, {})],
        "things: 0 of 1,900 records, batch 0, - records/s, lag 1,900, - left",
    ),
    "with the first batch there are rate and remaining time": (
        [(0.0, None, {}), (5.0, 1, HALF)],
        "things: 950 of 1,900 records, batch 1, 190 records/s, lag 950, 5 s left",
    ),
    "a batch that takes long makes the rate smaller": (
        [(0.0, None, {}), (5.0, 1, HALF), (10.0, 1, HALF)],
        "things: 950 of 1,900 records, batch 1, 95 records/s, lag 950, 10 s left",
    ),
    "at the end nothing is left whatever the rate": (
        [(0.0, 1, {TOPIC: {0: 2_000, 1: 2_000}})],
        "things: 1,900 of 1,900 records, batch 1, - records/s, lag 0, 0 s left",
    ),
}
Looks = list[tuple[float, int | None, dict[str, dict[int, int]]]]


@pytest.mark.parametrize(("looks", "words"), WALK.values(), ids=WALK)
def test_a_stream_walks_to_the_end_of_its_topics(disk: Disk, ahead: CatchingUp, looks: Looks, words: str) -> None:
    for at, disk.batch, disk.position in looks:
        (standing,) = ahead.look(at)
    assert str(standing) == words


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
