"""A whole preview on a stream's life on disk, in any store; only Spark's replay is written by hand."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import write_deltalake
from pyspark.sql.types import LongType, StructField, StructType

from reprocessing.preview import folders as preview_folders
from reprocessing.preview.folders import Folders, hold_previews
from reprocessing.preview.result import Preview, PreviewVerdict, headline, page, text
from reprocessing.preview.run import PreviewRequest, ReplayFailure, preview
from reprocessing.preview.start import NewestBatch, PreviewStart, Wanted, choose
from streaming_jobs.errors import PreflightRefused, TransientError, UsageError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.preflight.rules import check_start
from streaming_jobs.preflight.snapshot import take_snapshot
from streaming_jobs.runtime.spark_plan import INPUT
from streaming_jobs.runtime.state_changes import other_state
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import newest
from streaming_jobs.sinks.tables import all_tables, store_of
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import DeltaTable, Stream
from tests.support.life import PER_BATCH, ROWS, STREAM, Life, Topics, in_memory

pytestmark = pytest.mark.slow

BATCHES, SAVED = 6, 2


@pytest.fixture(params=[lambda: STREAM, in_memory])
def life(request: pytest.FixtureRequest, tmp_path: Path) -> Life:
    """Six batches of ten rows; a savepoint after the third."""
    life = Life.begin(tmp_path, request.param()).run(*range(SAVED + 1))
    life.savepoint(SAVED, "purpose")
    return life.run(*range(SAVED + 1, BATCHES))


def replaying(
    wrong: bool = False, code: str = "b", then: Callable[[Life], None] = lambda _: None
) -> Callable[..., ReplayFailure | None]:
    """The replay that a session would make, to the border."""

    def replay(
        folders: Folders, stream: Stream, record: StreamRecord, until: NewestBatch, _: Any
    ) -> ReplayFailure | None:
        staged, generation = Life(folders.replay_settings(), stream), record.generation + 1
        findings = check_start(take_snapshot(folders.replay_settings(), stream, Topics()))  # type: ignore[arg-type]
        assert [each.found for each in findings if each.severity == "refuse"] == []
        at = staged.at()
        assert at is not None and at.generation == generation
        for number in range(at.batch + 1, until.txn.batch + 1):
            staged.batch(number, generation=generation, code=code, wrong=wrong)
        assert staged.ends(until.txn.batch) == until.ends
        then(staged)
        return None

    return replay


def run(life: Life, wanted: Wanted = Wanted(), *, asked: dict[str, Any] | None = None, **how: Any) -> Preview:  # noqa: B008
    return preview(
        life.settings,
        life.stream,
        Topics(),  # type: ignore[arg-type]
        PreviewRequest(wanted, **{"replay": replaying(**how), **(asked or {})}),
    )


def files(root: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder but those of previews: bytes, and the time of the last change."""
    found = {}
    for folder, _, names in os.walk(root):
        for path in (Path(folder) / name for name in names):
            if "_previews" not in path.parts:
                found[str(path)] = (path.stat().st_size, path.stat().st_mtime_ns)
    return found


def test_a_preview_tries_code_that_nobody_has_deployed(life: Life) -> None:
    settings = life.settings.with_stream(life.stream.name, require_deploy=True)
    assert not Folders(settings, life.stream.name).replay_settings().for_stream(life.stream.name).require_deploy


def test_the_same_rows_are_equal_and_nothing_of_the_stream_is_changed(life: Life) -> None:
    before = files(life.settings.home)
    made = run(life)
    assert (made.verdict, made.verdict.exit_code) == (PreviewVerdict.equal, 0)
    assert made.savepoint == f"g0001-b{SAVED:09d}" and made.records == 30
    assert made.begin.txn == Txn(1, SAVED) and made.end.txn == Txn(1, BATCHES - 1)
    assert {each.hash for each in made.published_code} == {"a"}
    assert made.tables[0].difference.read == (30, 30), "only what came after the savepoint is read"
    assert made.tables[0].difference.old_rows == 60 == made.tables[0].difference.new_rows
    assert files(life.settings.home) == before
    assert not Folders(life.settings, life.stream.name).tables.exists()


def test_other_rows_are_different_and_named(life: Life) -> None:
    made = run(life, wrong=True)
    assert (made.verdict, made.verdict.exit_code) == (PreviewVerdict.different, 10)
    table = made.tables[0]
    assert table.difference.counts == (30, 0, 0)
    assert table.difference.totals["id"] == ("1335", "-1335") or table.difference.totals["id"] == (1335, -1335)
    shown = text(made, "/somewhere/report.html")
    assert shown.startswith("stream things: different: things rows: 30 corrected")
    assert "things/0: offsets 30 to 59" in shown and "report: /somewhere/report.html" in shown
    assert f"savepoint g0001-b{SAVED:09d}" in shown and "to g0001 batch 5" in shown
    assert "id 1335 -> -1335" in shown
    json.dumps(made.value(), default=str)
    assert "published" in page(made) and "<script" not in page(made)


def test_without_a_savepoint_it_begins_at_the_streams_start_with_todays_columns(life: Life) -> None:
    savepoints.drop(life.settings, life.stream, f"g0001-b{SAVED:09d}")
    made = run(life)
    assert made.verdict is PreviewVerdict.equal and made.savepoint is None and made.records == BATCHES * PER_BATCH
    assert made.begin.txn is None and "from the stream's start (there is no savepoint" in text(made)


def test_what_the_stream_writes_meanwhile_is_no_difference(life: Life) -> None:
    def runs_on(_: Life) -> None:
        life.run(BATCHES, BATCHES + 1, wrong=range(BATCHES, BATCHES + 2))

    made = run(life, then=runs_on)
    assert made.verdict is PreviewVerdict.equal and made.end.txn == Txn(1, BATCHES - 1)
    assert life.at() == Txn(1, BATCHES + 1)


def test_a_batch_that_comes_while_the_tables_are_looked_at_is_no_difference(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_and_write(*given: Any) -> Any:
        found = newest(*given)
        life.batch(BATCHES, wrong=True)
        return found

    monkeypatch.setattr("reprocessing.preview.start.newest", find_and_write)
    made = run(life)
    assert made.verdict is PreviewVerdict.equal and made.end.txn == Txn(1, BATCHES - 1)
    assert life.at() == Txn(1, BATCHES)


def test_a_change_by_another_program_is_named_as_such(tmp_path: Path) -> None:
    life = Life.of_batches(tmp_path, BATCHES)
    life.savepoint(SAVED, "purpose")
    # A row that somebody else has appended is published and not rebuilt.
    rows = life.stored().readable().to_pyarrow_table().slice(0, 1)
    write_deltalake(life.table, rows, mode="append")
    made = run(life)
    assert made.verdict is PreviewVerdict.different and made.tables[0].difference.counts.gone == 1
    assert "was written by another program" in made.notes[0]


def widened(staged: Life) -> None:
    """The replay's code has a new column."""
    declared, _ = all_tables(staged.stream)[0]
    columns = StructType([*ROWS.fields, StructField("price", LongType())])
    store_of(declared).ensure(staged.settings, declared, staged.stream.name, columns, generation=2)


def test_a_new_column_is_a_difference_also_if_all_rows_are_equal(life: Life) -> None:
    made = run(life, then=widened)
    assert made.verdict is PreviewVerdict.different and made.tables[0].new_columns == ("price",)
    assert headline(made) == "stream things: different: things new column price"


def test_failing_suites_are_broken_whatever_the_rows_are(life: Life) -> None:
    def suite(subject: Any, name: str) -> list[str]:
        assert Life(subject.replay_settings, subject.stream).ids()[-1] == BATCHES * PER_BATCH - 1, (
            "it sees the rebuilt rows"
        )
        return ["id_positive fails, 3 rows"] if name == "bad" else []

    made = run(life, asked={"suites": ("good", "bad"), "run_suite": suite})
    assert (made.verdict, made.verdict.exit_code) == (PreviewVerdict.broken, 1)
    assert "suite bad: id_positive fails, 3 rows" in headline(made) and "suite good: passes" in text(made)
    assert run(life, asked={"suites": ("good",), "run_suite": suite}).verdict is PreviewVerdict.equal


@pytest.mark.parametrize(
    ("starts", "verdict", "words"),
    [
        (True, PreviewVerdict.broken, "broken: the replay failed: it is <wrong>; next: correct it"),
        (False, PreviewVerdict.cannot_start, "cannot start on today's state: it is <wrong>; next: correct it"),
    ],
)
def test_a_replay_that_fails_is_a_verdict_with_the_fix(
    life: Life, starts: bool, verdict: PreviewVerdict, words: str
) -> None:
    def fails(*_: Any) -> ReplayFailure:
        return ReplayFailure("REC-021", "it is <wrong>", "correct it", starts=starts)

    made = run(life, asked={"replay": fails, "suites": ("never",)})
    assert (made.verdict, made.verdict.exit_code) == (verdict, 1) and words in headline(made)
    assert "it is &lt;wrong&gt;" in page(made) and "<wrong>" not in page(made)


STATE = {"0": "Aggregate [k]", INPUT: "a"}


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ({}, {}, "harmless"),
        (STATE, STATE, "harmless"),
        (STATE, {**STATE, INPUT: "b"}, "state fits"),
        (STATE, {"0": "Aggregate [j]", INPUT: "a"}, "state has to be rebuilt"),
    ],
)
@pytest.mark.parametrize("saved", [True, False])
def test_the_class_of_the_change_is_shown(
    life: Life, before: dict[str, str], after: dict[str, str], kind: str, saved: bool
) -> None:
    """From the start, Spark has not seen the stream's state, and a deploy shows whether it takes it."""
    stream_record.save(life.settings, replace(life.record, state_fingerprint=before))
    if not saved:
        savepoints.drop(life.settings, life.stream, f"g0001-b{SAVED:09d}")

    def builds(staged: Life) -> None:
        stream_record.save(staged.settings, replace(staged.record, state_fingerprint=after))

    made = run(life, then=builds)
    assert made.change is not None and made.change.kind == kind == made.value()["change"]["kind"]
    assert f"the change is: {kind}" in text(made)
    assert ("recourse deploy things" in made.change.why) is (not saved and bool(after) and "rebuilt" not in kind)
    assert ("recourse recover plan things --to-batch -1" in text(made)) is ("rebuilt" in kind)


def test_a_refused_state_is_the_class_of_a_preview_that_cannot_start(life: Life) -> None:
    error = other_state("things", "new: max(n)")
    failure = ReplayFailure(error.code, error.found, error.next_step, starts=False)
    made = run(life, asked={"replay": lambda *_: failure})
    assert made.change is not None and made.change.kind == "state has to be rebuilt"
    assert "recourse recover plan things --to-batch -1" in made.change.why


def test_a_table_that_is_no_longer_declared_cannot_start(tmp_path: Path) -> None:
    life = Life.of_batches(tmp_path, BATCHES)
    life.stream = replace(STREAM, sinks={"others": replace(STREAM.sinks["things"], name="others")})
    with pytest.raises(
        PreflightRefused, match="cannot start on today's state: stream things no longer writes table things"
    ):
        run(life)
    two = replace(STREAM, sinks={**STREAM.sinks, "copies": DeltaTable("copies")})
    life = Life.begin(tmp_path / "two", two)
    life.run(*range(BATCHES))
    life.stream = STREAM
    made = run(life)
    assert made.verdict is PreviewVerdict.cannot_start and "no longer writes table copies" in headline(made)


def test_what_there_is_nothing_of_is_refused(tmp_path: Path) -> None:
    settings = Settings.load({"home": tmp_path})
    with pytest.raises(UsageError, match="has never run"):
        preview(settings, STREAM, Topics(), PreviewRequest())  # type: ignore[arg-type]
    life = Life.begin(tmp_path)
    with pytest.raises(UsageError, match="has not written a batch yet"):
        run(life)


def test_while_a_recovery_is_under_way_it_is_refused(life: Life) -> None:
    life.stored().mark(LedgerEntry("fence", "things", "things", 2, -1, plan="things-0001"))
    with pytest.raises(PreflightRefused, match="plan things-0001 of table things is under way"):
        run(life)


def test_two_previews_of_a_stream_are_one_too_many(life: Life) -> None:
    with (
        hold_previews(Folders(life.settings, "things")),
        pytest.raises(UsageError, match="another preview of stream things"),
    ):
        run(life)
    with hold_previews(Folders(life.settings, "others")):
        assert run(life).verdict is PreviewVerdict.equal


def test_what_a_killed_preview_left_is_removed_by_the_next(life: Life) -> None:
    class Killed(BaseException):
        pass

    def dies(*_: Any) -> None:
        raise Killed

    folders = Folders(life.settings, "things")
    clear = Folders.clear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folders, "clear", lambda self: None if self.tables.is_dir() else clear(self))
        with pytest.raises(Killed):
            run(life, asked={"replay": dies})
    assert (folders.tables / "published").is_dir() and (folders.state / "replay").is_dir()
    assert run(life).verdict is PreviewVerdict.equal
    assert not folders.tables.exists() and not (folders.state / "replay").exists()


def test_a_savepoint_that_the_running_stream_drops_meanwhile_is_a_reason_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life.of_batches(tmp_path, BATCHES)
    life.savepoint(SAVED, "purpose")

    def choose_and_drop(*given: Any) -> PreviewStart:
        start = choose(*given)
        savepoints.drop(life.settings, life.stream, f"g0001-b{SAVED:09d}")
        return start

    monkeypatch.setattr("reprocessing.preview.run.choose", choose_and_drop)
    with pytest.raises(TransientError, match="was dropped while the preview began"):
        run(life)


def test_an_interrupted_preview_leaves_nothing(life: Life) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(life, asked={"replay": interrupted})
    assert not Folders(life.settings, "things").tables.exists()


def test_only_the_newest_reports_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview_folders, "REPORTS", 3)
    folders = Folders(Settings.load({"home": tmp_path}), "things")
    made = [folders.new_report().name for _ in range(5)]
    assert made[-1] == "000005" and sorted(each.name for each in folders.reports.iterdir()) == made[2:]


def test_the_replay_takes_one_core_and_keeps_no_savepoints(tmp_path: Path) -> None:
    settings = Settings.load({"home": tmp_path, "spark.master": "local[*]", "streams.things.lateness": "5 minutes"})
    own = Folders(settings, "things").replay_settings()
    assert own.spark.master == "local[1]" and not own.savepoint.every and own.table.compact_after_files == 0
    assert own.for_stream("things").max_restarts == 1 and own.for_stream("things").lateness is not None
    assert own.state.is_relative_to(settings.state) and own.tables.is_relative_to(settings.tables)
    assert preview_folders.one_core("spark://elsewhere:7077") == "spark://elsewhere:7077"
    assert preview_folders.one_core("local-cluster[2,1,512]") == "local-cluster[2,1,512]"
