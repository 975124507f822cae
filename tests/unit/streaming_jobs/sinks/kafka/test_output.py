"""A batch that waits in files is sent from exactly the files that were judged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streaming_jobs import KafkaSink, KafkaTopic, Text
from streaming_jobs.errors import TransientError
from streaming_jobs.settings import TopicSinkSettings
from streaming_jobs.sinks.base import BatchOfRows
from streaming_jobs.sinks.kafka.output import TopicOutput
from streaming_jobs.sinks.kafka.rows import KnownTopics
from streaming_jobs.sinks.kafka.writer import Discarded
from streaming_jobs.sources.topics import TopicInfo

SETTINGS = TopicSinkSettings()


class Lookup:
    """One topic."""

    def describe(self, name: str) -> TopicInfo | None:
        return TopicInfo(name, "id", 1, -1, "delete") if name == "lines" else None

    def names(self) -> set[str]:
        return {"lines"}


class Frame:
    """A frame of two partitions, as far as it is written."""

    parts = ({"value": ["a", "b"]}, {"value": ["c"]})

    @property
    def write(self) -> Frame:
        return self

    def parquet(self, folder: str) -> None:
        Path(folder).mkdir(parents=True)
        for number, rows in enumerate(self.parts):
            pq.write_table(pa.table(rows), f"{folder}/part-{number:05d}.parquet")


class Removed(Frame):
    """Its files are removed as soon as they are written."""

    def parquet(self, folder: str) -> None:
        super().parquet(folder)
        shutil.rmtree(folder)


def output(folder: Path) -> TopicOutput:
    sink = KafkaSink(KafkaTopic("lines", value=Text()))
    return TopicOutput(sink, "s", SETTINGS, Discarded(), KnownTopics(Lookup(), SETTINGS), folder)


def prepared(made: TopicOutput, frame: Any) -> Any:
    return made.prepare(frame, BatchOfRows(1, 0, driver=False))


def test_rows_in_files_are_records_in_the_order_of_the_partitions_each_time(tmp_path: Path) -> None:
    write = prepared(output(tmp_path), Frame())
    assert [[value for _, _, value, *_ in write.records] for _ in range(2)] == [[b"a", b"b", b"c"]] * 2
    assert write.rows == write.records.count == 3


def test_records_of_a_replay_say_when_their_source_was_first_read(tmp_path: Path) -> None:
    made, frame = output(tmp_path), Frame()
    rows = BatchOfRows(2, 0, driver=False, first_read=1_700_000_000_000)
    for headers in ([headers for *_, headers, _, _ in made.prepare(frame, rows).records] for _ in range(2)):
        assert all(dict(each)["recourse.first_read"] == b"1700000000000" for each in headers) and len(headers) == 3
    (first, *_) = prepared(made, frame).records
    assert "recourse.first_read" not in dict(first[3])


def test_files_that_another_driver_removed_are_no_empty_batch(tmp_path: Path) -> None:
    made = output(tmp_path)
    write = prepared(made, Frame())
    output(tmp_path).remove_leftovers()
    with pytest.raises(TransientError, match=r"part-00000\.parquet, are gone"):
        list(write.records)
    with pytest.raises(TransientError, match="are gone"):
        prepared(made, Removed())
