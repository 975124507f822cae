"""Spark's checkpoint is read as Spark reads it, and one that Spark would stumble over later is refused now."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming_jobs.errors import PreflightRefused
from streaming_jobs.state.checkpoint import Checkpoint
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


def test_the_last_batches_are_the_greatest_numbers_not_the_last_names(tmp_path: Path) -> None:
    lay_checkpoint(tmp_path, planned=11, committed=10)
    assert (Checkpoint(tmp_path).last_planned, Checkpoint(tmp_path).last_committed) == (11, 10)


def test_spark_own_side_files_are_no_batches(checkpoint: Checkpoint) -> None:
    for name in (".4.crc", ".5.a1b2.tmp", "4.compact"):
        (checkpoint.folder / "offsets" / name).write_text("")
    assert checkpoint.last_planned == 3
    checkpoint.check()


def test_a_batch_starts_where_the_one_before_it_ended(checkpoint: Checkpoint) -> None:
    assert checkpoint.end(2) == ends(2)
    assert checkpoint.start(3) == checkpoint.end(2)


def test_the_first_batch_starts_where_the_source_began(checkpoint: Checkpoint) -> None:
    (checkpoint.folder / "sources" / "0" / "0").write_text('\0v1\n{"things":{"0":70,"1":7}}')
    assert checkpoint.start(0) == {"things": {0: 70, 1: 7}}


def test_a_source_without_offsets_yet_stands_at_its_beginning(checkpoint: Checkpoint) -> None:
    path = checkpoint.folder / "offsets" / "0"
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:2], "-"]))
    assert checkpoint.end(0) == ends(-1)


def test_several_sources_lie_one_a_line(checkpoint: Checkpoint) -> None:
    path = checkpoint.folder / "offsets" / "3"
    path.write_text(path.read_text() + '\n{"prices":{"0":9}}')
    (checkpoint.folder / "sources" / "1").mkdir()
    assert checkpoint.end(3) == {**ends(3), "prices": {0: 9}}


def test_the_metadata_of_a_batch_can_be_read(checkpoint: Checkpoint) -> None:
    assert checkpoint.metadata(3)["conf"] == {"spark.sql.shuffle.partitions": "2"}


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


def test_a_sound_checkpoint_passes_between_and_inside_batches(tmp_path: Path) -> None:
    for planned, committed in ((0, None), (0, 0), (1, 0), (1, 1), (7, 6), (7, 7)):
        folder = tmp_path / f"{planned}-{committed}"
        lay_checkpoint(folder, planned=planned, committed=committed)
        Checkpoint(folder).check()


def test_spark_keeps_a_hundred_batches_and_older_ones_may_be_gone(tmp_path: Path) -> None:
    lay_checkpoint(tmp_path, planned=9, committed=9)
    for batch in range(6):
        (tmp_path / "offsets" / str(batch)).unlink()
        (tmp_path / "commits" / str(batch)).unlink()
    Checkpoint(tmp_path).check()


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
