"""The times of reading and decoding reach the driver by a file, and a file that is wrong or missing costs nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from streaming_jobs.sources.read_times import NO_TIMES, BatchReadTimes, ReadTimes


def test_the_planner_begins_a_batch_and_tasks_that_read_at_the_same_time_count_with_their_mean(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for _ in range(3):
        ReadTimes(9.0, 9.0).note_task(one)  # of the batch before
    ReadTimes(0.5, 0.25).note_batch(one)
    ReadTimes().note_batch(other)
    for read in (1.0, 3.0):
        ReadTimes(read, 1.0).note_task(other)
    assert BatchReadTimes.of([one, other]) == BatchReadTimes(ReadTimes(0.5, 0.25), ReadTimes(2.0, 1.0))


def test_no_file_no_folder_and_half_a_line_are_no_error(tmp_path: Path) -> None:
    ReadTimes(1.0, 1.0).note_batch(tmp_path / "gone" / "file")  # as on another machine
    ReadTimes(1.0, 1.0).note_task(None)
    (tmp_path / "cut").write_text("task 1.0 2.0\ntask 1.")
    assert BatchReadTimes.of([tmp_path / "gone" / "file"]) == NO_TIMES
    assert BatchReadTimes.of([tmp_path / "cut"]) == BatchReadTimes(ReadTimes(), ReadTimes(1.0, 2.0))


def test_the_time_that_others_take_between_two_blocks_is_not_reading() -> None:
    def blocks() -> Iterator[int]:
        time.sleep(0.02)
        yield 1
        yield 2

    times = ReadTimes()
    for _ in times.each_read(blocks()):
        time.sleep(0.1)
    assert 0.02 <= times.read < 0.1
