"""The batch of a job that a trial of its state computes again, and what is refused before Spark starts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from streaming_jobs.errors import UsageError
from streaming_jobs.inspection.adoption import CarriedState
from streaming_jobs.inspection.carried_state import StateTrial
from streaming_jobs.inspection.checkpoint_history import read_checkpoint
from streaming_jobs.settings import Settings
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.storage.locations import Location
from tests.support.plain_histories import TOPIC, PlainJob
from tests.unit.streaming_jobs.inspection.test_adoption import TwoPartitions, keep_state, orders

Compared = Callable[..., CarriedState]


@pytest.fixture
def job(tmp_path: Path) -> PlainJob:
    (tmp_path / "job").mkdir()
    made = PlainJob(tmp_path / "job", random.Random(3), "append-once")
    made.run(6)
    keep_state(made)
    return made


def tried(home: Settings, job: PlainJob, last: int = 5, topics: TwoPartitions | None = None) -> CarriedState:
    def no_spark() -> Any:
        raise AssertionError("Spark is not needed for that")

    trial = StateTrial(home, orders, topics or TwoPartitions(), cast("Any", None), no_spark)
    return trial(read_checkpoint(cast("Location", job.checkpoint)), last)


def test_the_newest_batch_is_computed_from_the_state_before_it_with_its_own_entry(
    home: Settings, job: PlainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []

    def compared(_: StateTrial, before: Path, again: Path, batch: int, ends: object) -> CarriedState:
        seen.extend((before, again))
        assert Checkpoint(before).last_committed == Checkpoint(before).last_planned == batch == 5
        assert (Checkpoint(again).last_committed, Checkpoint(again).last_planned) == (4, 5)
        assert ends == {TOPIC: dict(enumerate(job.position))} == Checkpoint(again).end(5)
        assert (before / "state/0/1/6.delta").is_file() and not (again / "state/0/1/6.delta").exists()
        assert (again / "state/0/1/5.delta").is_file()
        return CarriedState(batch, 1)

    monkeypatch.setattr(StateTrial, "_compared", compared)
    assert tried(home, job).batch == 5
    assert not any(each.exists() for each in seen), "the copies are removed"


def test_a_batch_without_records_or_whose_records_are_gone_is_not_chosen(
    home: Settings, job: PlainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateTrial, "_compared", lambda *given: CarriedState(given[3], 1))
    entries = job.checkpoint / "offsets"
    (entries / "5").write_text((entries / "4").read_text())
    assert tried(home, job).batch == 4
    with pytest.raises(UsageError, match="none of its batches up to 5 can be computed again"):
        tried(home, job, topics=TwoPartitions(earliest=900))


def test_a_state_without_its_batch_is_refused(home: Settings, job: PlainJob) -> None:
    (job.checkpoint / "commits" / "5").unlink()
    with pytest.raises(UsageError, match="does not have the state after batch 5 as a whole"):
        tried(home, job)


def test_state_on_a_store_and_of_two_topics_is_refused(home: Settings, job: PlainJob) -> None:
    stored = home.model_copy(update={"state_dir": "s3://bucket/state"})
    with pytest.raises(UsageError, match="on an object store is not taken over") as refused:
        tried(stored, job)
    assert "start the state from the records" in refused.value.next_step
    for entry in (job.checkpoint / "offsets").iterdir():
        entry.write_text(entry.read_text() + '\n{"returns":{"0":3}}')
    with pytest.raises(UsageError, match="reads more than one topic"):
        tried(home, job)
