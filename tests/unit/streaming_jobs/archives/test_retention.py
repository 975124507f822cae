"""The doctor says when retention is about to overtake an archive."""

from __future__ import annotations

from pathlib import Path

import pytest

from streaming_jobs.ledger.positions import OffsetBounds
from streaming_jobs.preflight.doctor import archive_checks, check
from streaming_jobs.settings import Settings
from streaming_jobs.table_sources.table_archive import TableArchive
from tests.unit.streaming_jobs.archives.test_table_archive import KEEPER, Kafka, Keeper

ARCHIVE = TableArchive("a", "things", "x", Path("/nowhere"), Path("/nowhere"))
KAFKA = OffsetBounds({0: 100, 1: 100}, {0: 200, 1: 200})


@pytest.mark.parametrize(
    ("position", "ok", "words"),
    [
        ({0: 200, 1: 200}, True, "has all records"),
        ({0: 110, 1: 200}, True, "10% or more"),
        ({0: 200, 1: 109}, None, "retention is near: 9% of the records in things partition 1"),
        ({0: 101, 1: 90}, False, "offsets 90 to 99 of things partition 1 were deleted"),
        ({0: 200}, True, "has all records"),
    ],
)
def test_the_nearest_partition_decides(position: dict[int, int], ok: bool | None, words: str) -> None:
    found = check(ARCHIVE, position, KAFKA)
    assert found.ok is ok and words in found.found
    assert ok or "recourse streams run a" in found.fix


def test_a_topic_without_records_is_no_reason() -> None:
    assert check(ARCHIVE, {0: 100}, OffsetBounds({0: 100}, {0: 100})).ok


def test_each_archive_that_has_run_has_a_line(tmp_path: Path) -> None:
    settings = Settings.load({"home": tmp_path, "flows": ["tests.support.archived"]})
    assert list(archive_checks(settings, Kafka({0: 0, 1: 0}))) == []
    keeper = Keeper(settings, KEEPER).make()
    assert [(line.ok, line.found) for line in archive_checks(settings, Kafka({0: 0}))] == [(None, "covers no offsets")]
    keeper.batch(0)
    (line,) = archive_checks(settings, Kafka({0: 5, 1: 5}))
    assert (line.name, line.ok) == (
        "archive create_archive",
        None,
    ) and "0% of the records in archived-create" in line.found
