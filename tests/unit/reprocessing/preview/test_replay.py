"""The end of a preview's replay, the check of its state, and what a failed session says about the code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import StructField, StructType, TimestampType

from reprocessing.preview.folders import Folders
from reprocessing.preview.run import _Guard, border, prepare, replay
from reprocessing.preview.start import NewestBatch, PreviewStart, newest_batch
from reprocessing.replay.session import ReplayFailure, ReplayResult, ReplaySession, failure_of
from streaming_jobs.errors import OutputMismatch, PreflightRefused, RuleBroken, TransientError
from streaming_jobs.formats import Json
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.runtime.batch_hooks import StopAtBorder
from streaming_jobs.state import stream_record
from streaming_jobs.stream import KafkaTopic
from tests.support.life import STREAM, TOPIC, Life

TIMED = StructType([StructField("at", TimestampType(), False)])
AGGREGATE = {"0": "Aggregate [place#1], [place#1, sum(id) AS total]"}


def until(begin: int | None, end: int) -> NewestBatch:
    """A newest batch with these offsets."""
    return NewestBatch(Txn(1, 1), {TOPIC: {0: end}}, None if begin is None else {TOPIC: {0: begin}}, 0.0, {}, {})


def windows(life: Life) -> Any:
    """The stream with an event time."""
    topic = KafkaTopic(TOPIC, Json(TIMED), event_time="at", lateness="1 minute")
    return replace(life.stream, sources={"value": topic})


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life.of_batches(tmp_path, 3)


def test_the_replay_is_stopped_before_a_batch_that_begins_at_the_border(life: Life) -> None:
    ends_here = border(life.settings, STREAM, life.record, until(10, 20))
    assert not ends_here(life.checkpoint(), 1), "batch 1 ends at the border"
    with pytest.raises(StopAtBorder):
        ends_here(life.checkpoint(), 2)


def test_a_batch_that_would_go_past_the_border_is_cut_there(life: Life) -> None:
    assert border(life.settings, STREAM, life.record, until(10, 15))(life.checkpoint(), 1)
    assert life.checkpoint().end(1) == {TOPIC: {0: 15}}


def test_for_windows_a_batch_begins_where_the_newest_one_began(life: Life) -> None:
    stateful = replace(life.record, state_fingerprint=AGGREGATE)
    assert border(life.settings, windows(life), stateful, until(12, 20)).steps == ({TOPIC: {0: 12}}, {TOPIC: {0: 20}})
    for stream, record, begin in (
        (STREAM, stateful, 12),
        (windows(life), life.record, 12),
        (windows(life), stateful, None),
    ):
        assert border(life.settings, stream, record, until(begin, 20)).steps == ({TOPIC: {0: 20}},)
    empty = border(life.settings, windows(life), stateful, until(20, 20))
    assert empty.empty_last and empty.steps == ({TOPIC: {0: 20}},)
    assert not empty(life.checkpoint(), 1)
    life.batch(2)  # it begins at the border: an empty batch first
    assert empty(life.checkpoint(), 2) and life.checkpoint().end(2) == {TOPIC: {0: 20}}


def test_state_that_the_running_stream_does_not_keep_is_refused_also_without_a_savepoint(life: Life) -> None:
    folders = Folders(life.settings, "things")
    found = newest_batch(folders, STREAM, life.record)
    prepare(folders, STREAM, life.record, PreviewStart(None, life.record.starts, ""))
    own = folders.replay_settings()
    staged = Life(own)
    staged.plan(0, generation=2)
    guard = _Guard(own, "things", life.record, border(own, STREAM, life.record, found))
    assert not guard(staged.checkpoint(2), 0)
    begun = stream_record.load(own, "things")
    assert begun is not None
    stream_record.save(own, replace(begun, state_fingerprint=AGGREGATE))
    with pytest.raises(PreflightRefused, match="built by another aggregation") as refused:
        guard(staged.checkpoint(2), 0)
    assert "recourse recover plan things --to-batch -1" in refused.value.next_step


def failed(code: str, *, began: bool, permanent: bool = True) -> ReplayFailure:
    """The failure of a session whose only stream has failed."""
    error = {"code": code, "found": "it is wrong", "next": "correct it", "permanent": permanent}
    status: Any = SimpleNamespace(error=error)
    return failure_of(SimpleNamespace(status=status, pipeline=object() if began else None))  # type: ignore[arg-type]


def test_a_refusal_means_that_the_stream_could_not_start_a_failure_in_a_batch_that_the_replay_failed() -> None:
    assert failed(RuleBroken.code, began=True).starts
    assert not failed(RuleBroken.code, began=False).starts
    assert not failed(PreflightRefused.code, began=True).starts
    assert not failed(OutputMismatch.code, began=True).starts
    assert failed(RuleBroken.code, began=True).next_step == "correct it"


def test_what_may_pass_is_no_verdict_about_the_code(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    away = failed("REC-010", began=True, permanent=False)
    monkeypatch.setattr(ReplaySession, "run", lambda *_: ReplayResult(None, away))
    with pytest.raises(TransientError, match="the replay failed: REC-010 it is wrong") as failure:
        replay(Folders(life.settings, "things"), STREAM, life.record, until(0, 10), lambda _: None)
    assert failure.value.next_step == "correct it"
