"""The commits of a redrive: each table once, the table of what was set aside last, never a record twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from streaming_jobs.errors import Fenced, TransientError
from streaming_jobs.preflight.rules import check_start
from streaming_jobs.preflight.snapshot import take_snapshot
from streaming_jobs.runtime import redrive_commits
from streaming_jobs.runtime.slice_commits import PUT_OFF, SliceCommits
from streaming_jobs.sinks.delta.log import moving, walk
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.redriven import redriven as taking
from streaming_jobs.sinks.tables import open_tables
from streaming_jobs.state import savepoints
from streaming_jobs.table_sources.versions import TableVersions
from tests.support import ROOT
from tests.support.days import Days, Topics
from tests.support.redrives import (
    LETTERS,
    asked,
    carry_out,
    letters,
    record,
    redriven,
    requests_of,
    with_letters,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def life(tmp_path: Path) -> Days:
    return with_letters(Days.of(tmp_path, 3), 100, 101, 102, 103)


def state_of(life: Days, name: str) -> str:
    ended = requests_of(life).outcome(name)
    return "" if ended is None else ended.state


def commits_of(life: Days, now: float = 0.0) -> SliceCommits:
    return SliceCommits(life.requests, requests_of(life), open_tables(life.settings, life.stream), lambda: now)


def test_rows_come_and_letters_go_once_and_the_position_stays(life: Days) -> None:
    before = life.at(), life.stored(LETTERS).position
    request = asked(life, "a", [record(100), record(101, "no row"), record(102, "dead again", reason_now="null_key")])
    tables = open_tables(life.settings, life.stream)
    redrive_commits.carry_out_redrives(requests_of(life), tables)
    assert tables["days"].position == before[0], "as the driver that goes on with the open table sees it"
    assert state_of(life, "a") == "committed" and redriven(life) == [100]
    assert letters(life) == {102: "null_key", 103: "malformed_json"}
    assert (life.at(), life.stored(LETTERS).position) == before
    for part in request.parts:  # whoever asks again, after the log was cleaned up or not
        assert taking(tables[part.table]).has(part.ledger)
    assert taking(tables["days"]).add(requests_of(life).rows("a", "days"), request.parts[0].ledger) is None
    assert redriven(life) == [100]
    life.batch(3)
    assert life.at() == life.entry(3).txn


def test_a_redrive_of_an_earlier_version_is_read(life: Days) -> None:
    asked(life, "a", [record(100)])
    (waiting,) = (requests_of(life).folder / "waiting").glob("*.json")
    waiting.write_text(json.dumps({**json.loads(waiting.read_text()), "ranges": []}))
    carry_out(life)
    assert state_of(life, "a") == "committed" and redriven(life) == [100]


def test_of_two_redrives_of_a_letter_one_is_committed(life: Days) -> None:
    asked(life, "a", [record(100), record(101)])
    asked(life, "b", [record(101), record(102)])
    carry_out(life)
    assert (state_of(life, "a"), state_of(life, "b")) == ("committed", "outdated")
    assert redriven(life) == [100, 101] and set(letters(life)) == {102, 103}


@pytest.mark.parametrize("point", ["redrive_next:0", "redrive_next:1", "redrive_ended:0"])
def test_a_kill_at_any_point_is_carried_on_with_the_same_rows(life: Days, point: str) -> None:
    asked(life, "a", [record(100), record(101)])
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from tests.support.days import Days, declared\nfrom tests.support.redrives import carry_out\n"
        "from streaming_jobs.settings import Settings\n"
        "carry_out(Days(Settings.load({'home': Path(sys.argv[1])}), declared()))\n"
    )
    environment = {**os.environ, "RECOURSE_CRASH": f"days:{point}", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(life.settings.home)]
    done = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    asked(life, "b", [record(101), record(102)])
    carry_out(life)
    assert (state_of(life, "a"), state_of(life, "b")) == ("committed", "outdated")
    assert redriven(life) == [100, 101] and set(letters(life)) == {102, 103}


def test_while_one_table_lacks_a_redrive_no_batch_begins(life: Days, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(life, "a", [record(100)])
    commits, batches = commits_of(life), list[int]()

    def full_disk(point: str, stream: str, number: int) -> None:
        if (point, number) == ("redrive_next", 1):
            raise OSError("no space left on device")

    def batch(_: object, number: int) -> None:
        batches.append(number)

    with monkeypatch.context() as patched:
        patched.setattr(redrive_commits, "crash_point", full_disk)
        with pytest.raises(TransientError, match="not in all of its tables"):
            commits.around(batch)(None, 3)  # type: ignore[arg-type]
    assert isinstance(batch.failure, TransientError)  # type: ignore[attr-defined]  # Spark passes on its text alone
    assert not batches and redriven(life) == [100] and len(letters(life)) == 4
    commits.clock = lambda: PUT_OFF + 1.0
    commits.around(batch)(None, 3)  # type: ignore[arg-type]
    assert batches == [3] and redriven(life) == [100] and set(letters(life)) == {101, 102, 103}


def test_after_a_recovery_or_too_late_or_with_unknown_columns_it_is_refused_with_nothing_changed(life: Days) -> None:
    asked(life, "late", [record(100)], seconds=-1.0)
    request = asked(life, "wide", [record(100)])
    rows = requests_of(life).rows("wide", "days")
    requests_of(life).keep_rows("wide", "days", rows.append_column("new", rows["n"]))
    carry_out(life)
    assert (state_of(life, "late"), state_of(life, "wide")) == ("expired", "outdated")
    ended = requests_of(life).outcome("wide")
    assert ended is not None and "no column new" in ended.reason and ended.parts == request.parts

    asked(life, "fenced", [record(100)])
    sink = life.sink()
    sink.commit_actions([], moving(replace(life.entry(-1, 2), kind="fence"), sink.app_id))
    with pytest.raises(Fenced):
        life.sink().holds(request.parts[0].ledger)
    carry_out(life)
    assert state_of(life, "fenced") == "outdated" and not redriven(life) and len(letters(life)) == 4


def test_preflight_savepoints_compaction_and_readers_take_it_for_the_stream_s_own(life: Days) -> None:
    before = savepoints.take(life.settings, life.stream, life.record, 2, "code")
    asked(life, "a", [record(100)])
    TableMaintenance(life.sink(), life.settings.table, 1).compact()
    carry_out(life)
    assert not check_start(take_snapshot(life.settings, life.stream, Topics()))
    again = savepoints.take(life.settings, life.stream, life.record, 2, "recovery")
    assert again.id == before.id and again.tables[0].version == life.stored().version
    for name, rows in (("days", 1), (LETTERS, 0)):
        newest = life.stored(name).version
        assert TableVersions(life.settings.tables / name, "days").version(newest).rows == rows
    kinds = [c.entry.kind for c in walk(life.sink().path) if c.entry is not None]
    assert kinds[0] == "redrive" and DeltaTable(life.sink().path).version() == life.sink().version
