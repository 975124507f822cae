"""The batches of a table: where each one ends, what it reads, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from streaming_jobs.errors import OffsetsLost
from streaming_jobs.sources.planner import BatchLimits
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_record import Accepted
from streaming_jobs.table_sources.planner import FileToRead, TablePlanner, is_small, tasks
from streaming_jobs.table_sources.versions import DataFile, TableVersions
from tests.conftest import SettingsFactory
from tests.support.written_table import WrittenTable

LIMITS = BatchLimits(seconds=3, records=5, bytes=1 << 30, wait=0.0)


@pytest.fixture
def table(tmp_path: Path) -> WrittenTable:
    return WrittenTable(tmp_path / "numbers").make()


def planner(table: WrittenTable, limits: BatchLimits = LIMITS) -> TablePlanner:
    return TablePlanner(TableVersions(table.path, "count"), limits)


def test_the_first_batch_is_the_whole_table_and_the_next_ones_are_bounded_by_rows(table: WrittenTable) -> None:
    for first in (1, 4, 7, 10):
        table.batch(first, first + 1, first + 2)
    plans = planner(table)
    assert plans.next_version(0) == 5
    assert [each.file.rows for each in plans.files(0, 5)] == [3, 3, 3, 3]
    assert plans.next_version(1) == 2, "two versions are six rows"
    assert planner(table, replace(LIMITS, records=6)).next_version(1) == 3
    assert plans.next_version(5) == 5
    table.batch()
    assert plans.next_version(5) == 6, "a version without rows is passed"
    assert plans.files(5, 6) == []


def test_a_version_with_more_rows_than_the_bound_is_a_batch_of_its_own(table: WrittenTable) -> None:
    table.batch(*range(20))
    table.batch(1)
    assert planner(table).next_version(1) == 2


def test_with_available_now_it_ends_where_the_table_ended_or_at_the_bound(table: WrittenTable) -> None:
    table.batch(1)
    table.batch(2)
    plans, bounded = planner(table), planner(table, replace(LIMITS, until={0: 2}))
    plans.stop_at_present_end()
    bounded.stop_at_present_end()
    table.batch(3)
    assert plans.next_version(1) == 3 and plans.next_version(3) == 3
    assert bounded.next_version(0) == 2 and bounded.next_version(2) == 2
    with pytest.raises(OffsetsLost, match="ends at version 3, and the stream has read up to 8"):
        planner(table, replace(LIMITS, until={0: 9})).stop_at_present_end()


def test_what_is_gone_is_refused_with_its_range_and_so_is_a_table_that_was_put_back(table: WrittenTable) -> None:
    for number in (1, 2, 3, 4):
        table.batch(number)
    for version in (1, 2):
        (table.path / "_delta_log" / f"{version:020d}.json").unlink()
    with pytest.raises(OffsetsLost, match="versions 1 to 2 of table numbers can no longer be read"):
        planner(table).next_version(1)
    assert planner(table).next_version(3) == 5
    with pytest.raises(OffsetsLost, match="ends at version 4, and the stream has read up to 8"):
        planner(table).next_version(9)


def test_it_waits_for_a_first_version_as_long_as_the_limits_say(table: WrittenTable) -> None:
    now = [0.0]
    plans = TablePlanner(
        TableVersions(table.path, "count"),
        replace(LIMITS, wait=1.0),
        monotonic=lambda: now[0],
        sleep=lambda seconds: (
            now.__setitem__(0, now[0] + seconds) or (now[0] > 0.5 and table.version == 0 and table.batch(1))
        ),
    )
    assert plans.next_version(1) == 2 and 0.5 < now[0] < 1.0
    assert plans.next_version(2) == 2 and now[0] > 1.5


def test_tasks_get_runs_of_files_in_order_and_of_about_the_same_size() -> None:
    files = [FileToRead(1, 0, DataFile(f"f{n}", {}, 10, 1)) for n in range(10)]
    parts = tasks(files, 3)
    assert [each for part in parts for each in part] == files
    assert [len(part) for part in parts] == [4, 3, 3]
    assert tasks([], 3) == [] and is_small(files)
    assert not is_small([FileToRead(1, 0, DataFile("f", {}, 10, 30_000))])


def test_a_batch_ends_before_rows_that_other_programs_may_still_take_back(
    table: WrittenTable, settings: SettingsFactory
) -> None:
    home = settings()
    table.batch(1)
    first, foreign = table.batch(2), table.foreign(8)
    accepted = (Accepted("numbers", foreign, "right", 0.0),)
    stream_record.save(home, replace(stream_record.first("count"), accepted=accepted))
    records = (home.state / "count" / "stream.json",)
    plans = TablePlanner(TableVersions(table.path, "count", records), LIMITS)
    assert plans.next_version(first) == foreign and plans.next_version(foreign) == foreign
    table.batch(3)
    assert plans.next_version(foreign) == foreign + 2
    assert [each.file.rows for each in plans.files(foreign, foreign + 2)] == [1, 1]
