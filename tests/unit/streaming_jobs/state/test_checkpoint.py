"""Spark's checkpoint is read as Spark reads it, and one that Spark would stumble over later is refused now."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming_jobs.errors import PreflightRefused
from streaming_jobs.state.checkpoint import Checkpoint, point_to, state_skew
from streaming_jobs.storage.files import hard_link
from tests.support.stream_on_disk import as_json
from tests.support.worlds import ends, lay_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Batches 0 to 3 are done."""
    lay_checkpoint(tmp_path / "g0001", planned=3, committed=3)
    return Checkpoint(tmp_path / "g0001")


def test_a_stream_that_never_ran_has_an_empty_and_sound_checkpoint(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "g0001")
    checkpoint.check()
    assert (checkpoint.last_planned, checkpoint.last_committed, checkpoint.exists) == (None, None, False)


def test_the_last_batches_are_the_greatest_numbers_and_neither_last_names_nor_sparks_side_files(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    lay_checkpoint(tmp_path, planned=11, committed=10)
    assert (Checkpoint(tmp_path).last_planned, Checkpoint(tmp_path).last_committed) == (11, 10)
    for name in (".4.crc", ".5.a1b2.tmp", "4.compact"):
        (checkpoint.folder / "offsets" / name).write_text("")
    assert checkpoint.last_planned == 3
    checkpoint.check()


def test_a_batch_starts_where_the_one_before_it_ended_and_the_first_where_the_source_began(
    checkpoint: Checkpoint,
) -> None:
    assert checkpoint.start(3) == checkpoint.end(2) == ends(2)
    (checkpoint.folder / "sources" / "0" / "0").write_text('\0v1\n{"things":{"0":70,"1":7}}')
    assert checkpoint.start(0) == {"things": {0: 70, 1: 7}}
    assert checkpoint.metadata(3)["conf"] == {"spark.sql.shuffle.partitions": "2"}


def test_several_sources_lie_one_a_line_and_one_without_offsets_yet_stands_at_its_beginning(
    checkpoint: Checkpoint,
) -> None:
    path = checkpoint.folder / "offsets" / "0"
    path.write_text("\n".join([*path.read_text().split("\n")[:2], "-"]))
    assert checkpoint.end(0) == ends(-1)
    path = checkpoint.folder / "offsets" / "3"
    path.write_text(path.read_text() + '\n{"prices":{"0":9}}')
    (checkpoint.folder / "sources" / "1").mkdir()
    assert checkpoint.end(3) == {**ends(3), "prices": {0: 9}}


@hypothesis.settings(max_examples=40)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z._-]{1,20}", fullmatch=True),
        st.dictionaries(st.integers(0, 300), st.integers(0, 2**63 - 1), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    )
)
def test_any_offsets_come_back_as_numbers(tmp_path_factory: pytest.TempPathFactory, offsets: dict) -> None:  # type: ignore[type-arg]
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "offsets").mkdir()
    (folder / "offsets" / "5").write_text(f"v1\n{{}}\n{as_json(offsets)}")
    assert Checkpoint(folder).end(5) == offsets


def test_a_sound_checkpoint_passes_between_and_inside_batches_and_without_those_that_spark_no_longer_keeps(
    tmp_path: Path,
) -> None:
    for planned, committed in ((0, None), (0, 0), (1, 0), (1, 1), (7, 6), (7, 7), (9, 9)):
        folder = tmp_path / f"{planned}-{committed}"
        lay_checkpoint(folder, planned=planned, committed=committed)
        Checkpoint(folder).check()
    for batch in range(6):
        (folder / "offsets" / str(batch)).unlink()
        (folder / "commits" / str(batch)).unlink()
    Checkpoint(folder).check()


def test_commit_entries_of_both_formats_are_whole(checkpoint: Checkpoint) -> None:
    unique = {"nextBatchWatermarkMs": 17, "stateUniqueIds": {"0": [["efe53e2c"], ["781b6a09"]]}}
    for text in ('v1\n{"nextBatchWatermarkMs":0}', "v2\n" + json.dumps(unique)):
        (checkpoint.folder / "commits" / "3").write_text(text)
        checkpoint.check()


DAMAGES = {
    "offsets/3": [
        "",
        "v1",
        "v1\n{}",
        "v3\n{}\n{}",
        "v1\nno json\n{}",
        'v1\n{}\n{"things"',
        'v1\n{}\n{"things":{"0":null}}',
    ],
    "offsets/2": ["", "v1\n{}", 'v1\n{}\n"things"', 'v1\n{}\n{"things":3}', "\xff"],
    "commits/3": ["", "v1", "v1\n", "v2\n[", "v9\n{}", "v1\n7"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in DAMAGES.items() for text in texts])
def test_a_truncated_or_garbled_entry_is_refused_by_its_name(checkpoint: Checkpoint, name: str, text: str) -> None:
    (checkpoint.folder / name).write_text(text, encoding="latin-1")
    with pytest.raises(PreflightRefused, match=f"{name} cannot be read") as refused:
        checkpoint.check()
    assert "put the checkpoint folder back" in refused.value.next_step


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("metadata", "metadata is missing"),
        ("offsets/3", "offsets/3 is missing, although the batch was committed"),
        ("offsets/2", "offsets/2 is missing"),
        ("offsets", "offsets is empty, although batches were committed"),
        ("commits", "commits/2 is missing, although the next batch was planned"),
    ],
)
def test_a_missing_entry_is_refused_by_its_name(checkpoint: Checkpoint, gone: str, words: str) -> None:
    path = checkpoint.folder / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(PreflightRefused, match=words):
        checkpoint.check()


def test_two_missing_commits_are_refused_and_one_is_a_batch_under_way(checkpoint: Checkpoint) -> None:
    (checkpoint.folder / "commits" / "3").unlink()
    checkpoint.check()
    (checkpoint.folder / "commits" / "2").unlink()
    with pytest.raises(PreflightRefused, match="commits/2 is missing"):
        checkpoint.check()


def test_the_beginning_of_a_source_must_be_there_for_the_first_batches(tmp_path: Path) -> None:
    lay_checkpoint(tmp_path, planned=0, committed=None)
    (tmp_path / "sources" / "0" / "0").write_text("\0v1")
    with pytest.raises(PreflightRefused, match="sources/0/0 cannot be read"):
        Checkpoint(tmp_path).check()


@pytest.mark.parametrize("text", ["", "v1", "v1\nno json\n{}"])
def test_metadata_that_cannot_be_read_is_refused(checkpoint: Checkpoint, text: str) -> None:
    (checkpoint.folder / "offsets" / "3").write_text(text)
    with pytest.raises(PreflightRefused, match="offsets/3 cannot be read"):
        checkpoint.metadata(3)


def metadata(checkpoint: Path, named: Path, batch: int = 3) -> Path:
    """State metadata of `transformWithState` as Spark 4.2 writes it, shortened, with the paths of another folder."""
    file = checkpoint / "state" / "0" / "_metadata" / "v2" / str(batch)
    file.parent.mkdir(parents=True, exist_ok=True)
    paths = [f"file:{named}/state/0/_stateSchema/default/{each}" for each in ("0_a", "3_b")]
    stores = [{"storeName": "default", "numPartitions": 2, "stateSchemaFilePaths": paths}]
    told = {"operatorInfo": {"operatorId": 0}, "stateStoreInfo": stores, "operatorPropertiesJson": '{"a":"b"}'}
    file.write_text(f"v2\n{json.dumps(told, separators=(',', ':'))}")
    return file


def test_state_schemas_of_a_checkpoint_that_was_moved_are_its_own_and_shared_files_stay_as_they_are(
    tmp_path: Path,
) -> None:
    before, moved = tmp_path / "g0001", tmp_path / "a state" / "g0002"
    original = metadata(before, before)
    text = original.read_text()
    linked = moved / original.relative_to(before)
    hard_link(original, linked)
    linked.with_name(".3.crc").write_text("of the text before")
    assert point_to(moved) == [linked]
    assert linked.read_text() == metadata(tmp_path / "expected", moved).read_text()
    assert original.read_text() == text and not linked.with_name(".3.crc").exists()
    assert point_to(moved) == point_to(before) == []


def test_an_entry_of_named_sources_is_read_and_keeps_its_names(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "5").write_text('v2\n{"conf":{}}\nfirst:{"a":{"0":3}}\nsecond:{"b":{"0":4}}')
    named = Checkpoint(tmp_path)
    assert named.end(5) == {"a": {0: 3}, "b": {0: 4}} and named.metadata(5) == {"conf": {}}
    assert named.entry_ending_at(5, {"b": {0: 9}}).splitlines()[2:] == [
        'first:{"a": {"0": 3}}',
        'second:{"b": {"0": 9}}',
    ]


def snapshot(folder: Path, version: int, keys: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{version}_{'0' * 8}.zip", "w") as packed:
        packed.writestr("metadata", "v1\n" + json.dumps({"sstFiles": [], "numKeys": keys}))


def test_the_skew_of_the_state_is_that_of_the_newest_snapshots_and_known_once_each_partition_has_one(
    checkpoint: Checkpoint,
) -> None:
    state = Path(str(checkpoint.folder)) / "state"
    assert state_skew(checkpoint) is None
    for partition, keys in enumerate((10, 30, 20)):
        snapshot(state / "0" / str(partition), 9, 1_000)
        snapshot(state / "0" / str(partition), 10, keys)
    (state / "0" / "_metadata").mkdir()
    assert state_skew(checkpoint) == 1.5
    for partition in (0, 1):  # a join has several stores
        for store, keys in (("left-keyToNumValues", partition), ("right-keyToNumValues", 2 * partition)):
            snapshot(state / "1" / str(partition) / store, 5, keys)
    assert state_skew(checkpoint) == 2.0, "of all operators the greatest"
    (state / "1" / "2").mkdir()
    assert state_skew(checkpoint) == 1.5
    (state / "0" / "1" / "11_x.zip").write_bytes(b"half")
    assert state_skew(checkpoint) is None
