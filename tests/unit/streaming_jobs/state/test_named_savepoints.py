"""One savepoint of several streams under one name: whole or not there, retained as long as the name, dropped as one."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from streaming_jobs.errors import PreflightRefused, TransientError, UsageError
from streaming_jobs.settings import SavepointSettings, Settings
from streaming_jobs.state import savepoint_retention, savepoints
from streaming_jobs.state.savepoint_retention import drop_named, only_one, take_last, take_named, try_take
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.stream_record import Generation
from streaming_jobs.stream import Stream
from tests.support.life import Life
from tests.support.life_flows import OTHERS, STREAM

pytestmark = pytest.mark.slow

BOTH = (STREAM, OTHERS)
NAME = "before-release"


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def lives(tmp_path: Path) -> list[Life]:
    """Two streams, of which the second one is two batches behind."""
    return [Life.of_batches(tmp_path, count, stream.name) for stream, count in zip(BOTH, (6, 4), strict=True)]


@pytest.fixture
def settings(lives: list[Life]) -> Settings:
    return lives[0].settings


def ids(settings: Settings, stream: Stream) -> list[str]:
    return [each.id for each in savepoints.savepoints(settings, stream.name)]


def keep_nothing(settings: Settings) -> Settings:
    """Every savepoint that ages is over its age, but the newest one of a stream."""
    rule = SavepointSettings(keep=timedelta(0), keep_daily=timedelta(0), keep_named=settings.savepoint.keep_named)
    return settings.model_copy(update={"savepoint": rule})


def aged(settings: Settings, lives: list[Life]) -> None:
    """Each stream gets a newer savepoint by time, and the rest is dropped if it may be."""
    for life, number in zip(lives, (6, 4), strict=True):
        life.batch(number)
        savepoints.take(settings, life.stream, life.record, number, "time")
        savepoint_retention.prune(keep_nothing(settings), life.stream)


def test_each_stream_has_its_own_last_batch_under_the_name(settings: Settings) -> None:
    made = take_named(settings, BOTH, NAME, "why")
    assert made.streams == {"things": "g0001-b000000005", "others": "g0001-b000000003"}
    assert savepoint_retention.named(settings) == [made] == [savepoint_retention.find_named(settings, NAME)]
    assert made.until == pytest.approx(made.taken_at + 90 * 86_400)
    assert savepoint_retention.of_stream(settings, "others") == {NAME: made}


def test_killed_between_two_streams_there_is_no_name_and_what_was_taken_ages(
    settings: Settings, lives: list[Life]
) -> None:
    def killed(taken: Savepoint) -> None:
        if taken.stream == "things":
            raise Killed

    with pytest.raises(Killed):
        take_named(settings, BOTH, NAME, each=killed)
    assert savepoint_retention.named(settings) == [] and ids(settings, STREAM) == ["g0001-b000000005"]
    aged(settings, lives)
    assert ids(settings, STREAM) == ["g0001-b000000006"]
    assert take_named(settings, BOTH, NAME).streams["things"] == "g0001-b000000006"


def test_retention_keeps_what_a_name_holds(settings: Settings, lives: list[Life]) -> None:
    take_named(settings, BOTH, NAME)
    aged(settings, lives)
    assert ids(settings, STREAM) == ["g0001-b000000005", "g0001-b000000006"]
    savepoint_retention.remove_name(settings, NAME)
    savepoint_retention.prune(keep_nothing(settings), STREAM)
    assert ids(settings, STREAM) == ["g0001-b000000006"]


def test_the_bound_by_bytes_keeps_what_a_name_holds(
    settings: Settings, lives: list[Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_named(settings, BOTH, NAME)
    for number in (6, 7):
        lives[0].batch(number)
        savepoints.take(settings, STREAM, lives[0].record, number, "time")
    monkeypatch.setattr(savepoint_retention, "_MB", 0)
    savepoint_retention.prune(settings.model_copy(update={"savepoint": SavepointSettings(max_mb=1)}), STREAM)
    assert ids(settings, STREAM) == ["g0001-b000000005", "g0001-b000000007"]


def test_a_name_whose_time_is_over_holds_nothing_and_may_be_used_again(settings: Settings, lives: list[Life]) -> None:
    first = take_named(settings, BOTH, NAME, keep=timedelta(microseconds=1))
    time.sleep(0.001)
    aged(settings, lives)
    assert ids(settings, STREAM) == ["g0001-b000000006"]
    again = take_named(settings, BOTH, NAME, keep=timedelta(0))
    assert again.streams != first.streams and again.until is None
    take_named(settings, [STREAM], "other", keep=timedelta(microseconds=1))
    time.sleep(0.001)
    take_named(settings, [STREAM], "third")
    assert [each.name for each in savepoint_retention.named(settings)] == [NAME, "third"]


@pytest.mark.parametrize("name", ["", "g0001-b000000003", "../x", "a b", "1st", "_x", NAME])
def test_a_name_that_is_no_name_or_in_use_is_refused(settings: Settings, name: str) -> None:
    if name == NAME:
        take_named(settings, BOTH, NAME)
    with pytest.raises(UsageError, match="exists already" if name == NAME else "cannot name"):
        take_named(settings, [STREAM], name)
    assert (savepoint_retention.find_named(settings, name) is None) == (name != NAME)


def test_dropping_a_name_leaves_savepoints_that_were_there_before(settings: Settings, lives: list[Life]) -> None:
    savepoints.take(settings, STREAM, lives[0].record, 5, "purpose")
    take_named(settings, BOTH, NAME)
    drop_named(settings, {s.name: s for s in BOTH}, NAME)
    assert ids(settings, STREAM) == ["g0001-b000000005"] and ids(settings, OTHERS) == []


def test_a_name_is_given_to_savepoints_that_are_whole(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    take_named(settings, BOTH, NAME)
    drop, waited = savepoints.drop, list[str]()

    def dropping(settings: Settings, stream: Stream, name: str) -> None:
        with pytest.raises(TransientError, match="another process holds the names"), only_one(settings, wait=0):
            waited.append("not alone")
        drop(settings, stream, name)
        waited.append(name)

    monkeypatch.setattr(savepoints, "drop", dropping)
    drop_named(settings, {s.name: s for s in BOTH}, NAME)
    assert waited == ["g0001-b000000005", "g0001-b000000003"]


def test_retention_waits_a_moment_for_whoever_gives_names(
    settings: Settings, lives: list[Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(savepoint_retention, "_NAMES_WAIT", 0.05)
    first = savepoints.take(settings, STREAM, lives[0].record, 4, "time")
    taken = savepoints.take(settings, STREAM, lives[0].record, 5, "time")
    with only_one(settings):
        with pytest.raises(TransientError):
            savepoint_retention.prune(keep_nothing(settings), STREAM)
        assert try_take(settings, STREAM, lives[0].record, 5, "time") == taken, "it is only logged"
        assert ids(settings, STREAM) == [first.id, taken.id]
    assert savepoint_retention.prune(keep_nothing(settings), STREAM) == [first.id]


def test_streams_of_a_home_measure_their_savepoints_at_the_same_time(
    settings: Settings, lives: list[Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a lock of the whole home, one stream's long look would make the others leave theirs out."""
    for number in (4, 5):
        savepoints.take(settings, STREAM, lives[0].record, number, "time")
    measure = savepoint_retention.beyond

    def measured(*arguments: Any) -> list[Savepoint]:
        with only_one(settings, wait=0):
            return measure(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(savepoint_retention, "beyond", measured)
        assert savepoint_retention.prune(settings, STREAM) == []
    with only_one(settings):
        assert savepoint_retention.prune(settings, STREAM) == [], "and without anything to drop, nobody is waited for"


def test_a_savepoint_that_was_kept_for_a_purpose_meanwhile_is_not_dropped(
    settings: Settings, lives: list[Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (4, 5):
        savepoints.take(settings, STREAM, lives[0].record, number, "time")
    first, expired = savepoints.savepoints(settings, STREAM.name)[0], savepoint_retention.expired

    def kept(*arguments: Any) -> list[Savepoint]:
        gone = expired(*arguments)
        savepoints.keep_for(settings, first, "purpose", "a person")
        return gone

    monkeypatch.setattr(savepoint_retention, "expired", kept)
    assert savepoint_retention.prune(keep_nothing(settings), STREAM) == []
    assert first.id in ids(settings, STREAM)


def test_a_savepoint_for_a_purpose_is_kept_also_if_it_was_there(settings: Settings, lives: list[Life]) -> None:
    there = savepoints.take(settings, STREAM, lives[0].record, 5, "recovery", "for a plan")
    assert take_last(settings, STREAM, "purpose").note == "for a plan"
    savepoints.keep_for(settings, there, "time", "")
    taken = take_last(settings, STREAM, "purpose", "before the release")
    assert (taken.id, taken.reason, taken.note) == (there.id, "purpose", "before the release")
    aged(settings, lives)
    assert there.id in ids(settings, STREAM)
    assert savepoints.find(settings, STREAM.name, there.id) == taken


def test_what_a_name_holds_is_dropped_as_one_but_for_what_a_recovery_or_another_name_needs(settings: Settings) -> None:
    take_named(settings, BOTH, NAME)
    with pytest.raises(UsageError, match="needs savepoint g0001-b000000003 of stream others"):
        drop_named(settings, {s.name: s for s in BOTH}, NAME, lambda s: ["g0001-b000000003"] if s == "others" else [])
    assert savepoint_retention.find_named(settings, NAME) is not None and len(ids(settings, STREAM)) == 1
    take_named(settings, [OTHERS], "second")
    assert drop_named(settings, {s.name: s for s in BOTH}, NAME) == ["things g0001-b000000005"]
    assert ids(settings, STREAM) == [] and ids(settings, OTHERS) == ["g0001-b000000003"]
    assert [each.name for each in savepoint_retention.named(settings)] == ["second"]


def test_a_recovery_between_two_streams_is_noticed(settings: Settings, lives: list[Life]) -> None:
    def recovered(taken: Savepoint) -> None:
        if taken.stream == "others":
            record = lives[0].record
            opened = Generation(record.generation + 1, time.time(), "recovery", record.generation, 3)
            lives[0].save(type(record)(**{**record.__dict__, "generations": (*record.generations, opened)}))
            lives[0].plan(3, generation=opened.number)
            lives[0].finish(3, generation=opened.number)

    with pytest.raises((TransientError, PreflightRefused, UsageError)):
        take_named(settings, BOTH, NAME, each=recovered)
    assert savepoint_retention.named(settings) == []


def test_a_savepoint_that_retention_took_before_the_name_was_written_is_taken_again(
    settings: Settings, lives: list[Life]
) -> None:
    gone: list[str] = []

    def dropped(taken: Savepoint) -> None:
        if taken.stream == "others" and not gone:
            savepoints.drop(settings, STREAM, "g0001-b000000005")
            gone.append(taken.id)

    made = take_named(settings, BOTH, NAME, each=dropped)
    assert gone and savepoints.find(settings, "things", made.streams["things"]) is not None


def test_a_recovery_under_way_is_refused_before_and_after(settings: Settings) -> None:
    asked: list[int] = []

    def check() -> None:
        asked.append(1)
        if len(asked) > 1:
            raise UsageError("plan x is under way", "finish it")

    with pytest.raises(UsageError, match="plan x"):
        take_named(settings, BOTH, NAME, check=check)
    assert savepoint_retention.named(settings) == []


def test_a_damaged_file_is_refused_and_keeps_every_savepoint(settings: Settings, lives: list[Life]) -> None:
    take_named(settings, BOTH, NAME)
    (settings.state / "_savepoints" / f"{NAME}.json").write_text("{")
    with pytest.raises(PreflightRefused, match="cannot be read"):
        savepoint_retention.named(settings)
    with pytest.raises(PreflightRefused):
        savepoint_retention.prune(keep_nothing(settings), STREAM)
    assert len(ids(settings, STREAM)) == 1
