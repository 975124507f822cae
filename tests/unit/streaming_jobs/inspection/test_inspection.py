"""An inspection writes nothing, reads every form of a checkpoint, and says what it cannot know."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from streaming_jobs.errors import UsageError
from streaming_jobs.inspection import inspection
from streaming_jobs.inspection.checkpoint_history import read_checkpoint
from streaming_jobs.inspection.counted_offsets import OffsetColumns
from streaming_jobs.inspection.findings import MEANINGS, InspectionFinding
from streaming_jobs.inspection.inspection import Inspection, beside_topics, inspect
from streaming_jobs.inspection.page import page
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import OffsetBounds, OffsetRange
from tests.support.plain_histories import TOPIC, JobKind, PlainJob

COLUMNS = OffsetColumns("partition", "offset")
MakeJob = Callable[..., PlainJob]


@pytest.fixture
def plain_job(tmp_path: Path) -> MakeJob:
    """Makes a job: `plain_job("append")`."""

    def make(kind: JobKind = "sink", name: str = "job") -> PlainJob:
        (tmp_path / name).mkdir()
        return PlainJob(tmp_path / name, random.Random(7 if name == "job" else name), kind)

    return make


def look(job: PlainJob) -> Inspection:
    return inspect(job.checkpoints, [job.table])


def reasons(found: Inspection) -> list[tuple[str, str, str]]:
    return [(each.kind, each.certainty, each.reason) for each in found.findings]


def only(found: Inspection, reason: str) -> InspectionFinding:
    [finding] = [each for each in found.findings if each.reason == reason]
    return finding


def state_of(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Every path below a folder with its time of change, its size and its content."""
    return {
        str(path.relative_to(folder)): (
            (status := path.stat()).st_mtime_ns,
            status.st_size,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(folder.rglob("*"))
    }


def test_nothing_is_written_neither_by_the_log_nor_by_the_rows_and_read_only_files_are_enough(
    plain_job: MakeJob, tmp_path: Path
) -> None:
    job = plain_job("append")
    job.run(3, kill="written")
    job.run(12)
    job.cut_log()
    job.new_checkpoint([0, 0])
    job.run(2)
    before = state_of(tmp_path)
    for path in [*tmp_path.rglob("*"), tmp_path]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    found = inspect(job.checkpoints, [job.table], COLUMNS)
    assert page(found) and json.dumps(found.as_json()) and found.alarming
    for path in [tmp_path, *tmp_path.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    assert state_of(tmp_path) == before


def test_named_sources_and_two_topics_and_a_delta_source_are_read(plain_job: MakeJob) -> None:
    job = plain_job()
    job.run(3)
    for number in range(3):
        path = job.checkpoint / "offsets" / str(number)
        _, metadata, offsets = path.read_text().split("\n")
        delta = json.dumps({"sourceVersion": 1, "reservoirId": "x", "reservoirVersion": 4, "index": -1})
        second = json.dumps({"returns": {"0": number + 1}})
        path.write_text(f"v2\n{metadata}\norders:{offsets}\ntable:{delta}\nreturns:{second}")
        (job.checkpoint / "sources" / "2").mkdir(exist_ok=True)
        (job.checkpoint / "sources" / "2" / "0").write_text('\0v1\n{"returns":{"0":0}}')
    history = read_checkpoint(job.checkpoint)
    assert history.sources == ("kafka", "delta", "kafka") and history.trouble == ()
    assert (
        history.batches[2].start == {"orders": {0: 12, 1: 0}, "returns": {0: 2}} or "returns" in history.batches[2].end
    )
    assert not look(job).alarming


def test_files_that_cannot_be_read_are_named_and_the_rest_is_judged(plain_job: MakeJob) -> None:
    job = plain_job()
    job.run(6)
    (job.checkpoint / "offsets" / "2").write_text("v1\n{}")
    (job.checkpoint / "commits" / "4").unlink()
    (job.checkpoint / "metadata").write_text("")
    (job.table / "_delta_log" / f"{1:020d}.json").write_text("{")
    words = [each.words for each in look(job).findings if each.kind == "damaged"]
    for part in ("offsets/2 cannot be read", "commits/4 is missing", "metadata cannot be read", "version 1 of the log"):
        assert any(part in each for each in words), (part, words)


@pytest.mark.parametrize("text", ["", "v1", "v1\n{}", "v3\n{}\n{}"])
def test_an_entry_that_was_cut_off_is_damaged(plain_job: MakeJob, text: str) -> None:
    job = plain_job("append")
    job.run(4)
    (job.checkpoint / "offsets" / "3").write_text(text)
    found = look(job)
    assert "offsets/3 cannot be read" in only(found, "checkpoint").words
    assert not found.alarming


@pytest.mark.parametrize("kind", ["sink", "append"])
def test_a_line_of_a_source_that_was_cut_off_is_damage_and_neither_loss_nor_double(
    plain_job: MakeJob, kind: JobKind
) -> None:
    job = plain_job(kind)
    job.run(6)
    path = job.checkpoint / "offsets" / "3"
    path.write_text(path.read_text()[:-4])
    found = look(job)
    assert "offsets/3: the line of source 0 is no JSON" in only(found, "checkpoint").words
    history = found.checkpoints[0]
    assert 3 not in history.batches and history.batches[4].start is None and history.sources == ("kafka",)
    assert not found.alarming, reasons(found)


def test_a_gap_in_the_log_is_damage_and_no_loss(plain_job: MakeJob) -> None:
    job = plain_job()
    job.run(6)
    (job.table / "_delta_log" / f"{2:020d}.json").unlink()
    found = look(job)
    assert not found.alarming
    assert ("damaged", "certain", "log") in reasons(found)


def test_a_path_that_is_no_checkpoint_or_no_table_is_refused(plain_job: MakeJob, tmp_path: Path) -> None:
    job = plain_job()
    job.run(1)
    with pytest.raises(UsageError, match="is not a checkpoint of Spark"):
        inspect([job.table], [job.table])
    with pytest.raises(UsageError, match="is not a Delta table"):
        inspect([job.checkpoint], [tmp_path])
    with pytest.raises(UsageError, match="has no column 'ofset'"):
        inspect([job.checkpoint], [job.table], OffsetColumns("partition", "ofset"))
    with pytest.raises(UsageError, match="such as partition,offset"):
        OffsetColumns.parse("offset")


def test_jobs_of_two_tables_do_not_count_as_losses_of_each_other(plain_job: MakeJob) -> None:
    one, other = plain_job("sink", "one"), plain_job("append", "other")
    one.run(3)
    other.clock += 5_000
    other.run(3)
    found = inspect([*one.checkpoints, *other.checkpoints], [one.table, other.table])
    assert not found.alarming, reasons(found)


@pytest.mark.parametrize("kind", ["sink", "append", "append-once", "merge"])
def test_a_checkpoint_that_is_in_no_table_is_named_and_counts_for_the_table_of_the_one_before_it(
    plain_job: MakeJob, kind: JobKind
) -> None:
    job, other = plain_job(kind), plain_job("sink", "other")
    other.clock += 5_000
    other.run(2)
    job.run(4)
    version = job.version
    job.new_checkpoint(job.position)
    job.run(3)
    job.put_back_table(version)
    found = inspect([*job.checkpoints, *other.checkpoints], [job.table, other.table])
    missing = [each for each in found.findings if each.kind == "missing"]
    lost = {(s.partition, offset) for each in missing for s in each.spans for offset in range(s.start, s.end)}
    assert lost == {(p, o) for _, p, o in job.missing} and {each.table for each in missing} == {job.table.name}
    assert found.alarming and {each.checkpoint for each in missing} == {str(job.checkpoint)}
    if kind != "append-once":  # there, commits of the first checkpoint have the transactions of the second
        assert only(found, "no_commit").checkpoint == str(job.checkpoint)


def test_a_checkpoint_and_the_table_of_another_job_are_no_proof_that_nothing_is_lost(plain_job: MakeJob) -> None:
    one, other = plain_job("sink", "one"), plain_job("append", "other")
    other.clock += 5_000
    one.run(3)
    other.run(3)
    for tables in ([other.table], [other.table, other.table]):
        found = inspect(one.checkpoints, tables)
        assert ("unknown", "certain", "no_commit") in reasons(found) and not found.alarming
        assert "as far as checkpoint and log still tell" in found.verdict


def test_a_second_checkpoint_of_a_job_that_filters_may_have_written_nothing(plain_job: MakeJob) -> None:
    job = plain_job("append")
    job.run(4)
    for number in range(4):
        path = job.table / "_delta_log" / f"{number:020d}.json"
        path.write_text(path.read_text().replace('"numOutputRows":"6"', '"numOutputRows":"5"'))
    version = job.version
    job.new_checkpoint(job.position)
    job.run(1)
    job.put_back_table(version)
    found = look(job)
    assert ("missing", "unclear", "not_written") in reasons(found) and not found.alarming
    assert found.verdict == "no loss and no double is certain or likely; 1 finding may be one"


def test_rows_that_a_job_has_filtered_are_unclear_and_no_loss(plain_job: MakeJob) -> None:
    job = plain_job("sink")
    job.run(4)
    path = next(iter(job.live))
    gone = job.files[path].pop()
    job.files[job._file(job.files[path])] = job.files[path]
    newest = list(job.files)[-1]
    shutil.move(job.table / newest, job.table / path)
    found = inspect(job.checkpoints, [job.table], COLUMNS)
    counted = only(found, "counted")
    assert (counted.kind, counted.certainty) == ("unknown", "unclear") and not found.alarming
    assert [(span.partition, span.start, span.end) for span in counted.spans] == [(gone[1], gone[2], gone[2] + 1)]


def test_a_batch_without_rows_of_a_job_that_filters_stays_unclear_when_the_rows_are_counted(plain_job: MakeJob) -> None:
    job = plain_job("append")
    job.keep = lambda record: record[2] % 2 == 0 and len(job.batches) != 5
    job.run(7)
    found = inspect(job.checkpoints, [job.table], COLUMNS)
    missing = only(found, "not_written")
    assert (missing.certainty, missing.counted, missing.batches) == ("unclear", False, (4,)) and not found.alarming
    assert ("unknown", "unclear", "counted") in reasons(found)


def test_many_single_offsets_that_no_row_has_are_counted_in_a_few_seconds(plain_job: MakeJob) -> None:
    job = plain_job()
    job.run(2)
    job.run(1, size=16_000)
    job.restore(job.version - 1)
    job.commit("WRITE", {"mode": "Append"}, add=[[record for record in sorted(job.missing) if record[2] % 2]])
    started = time.monotonic()
    found = inspect(job.checkpoints, [job.table], COLUMNS)
    assert time.monotonic() - started < 10
    assert only(found, "restored").records == len(job.missing) > 7_000


def test_rows_of_two_topics_are_counted_by_the_column_of_the_topic(plain_job: MakeJob) -> None:
    job = plain_job("sink")
    job.run(2)
    for number in range(2):
        path = job.checkpoint / "offsets" / str(number)
        path.write_text(path.read_text() + '\n{"returns":{"0":3}}')
    (job.checkpoint / "sources" / "1").mkdir()
    (job.checkpoint / "sources" / "1" / "0").write_text('\0v1\n{"returns":{"0":0}}')
    names = [TOPIC] * sum(job.position) + ["returns"] * 2 + [None]
    records = sorted(job.rows())
    table = pa.table(
        {
            "topic": names,
            "partition": pa.array([*(p for _, p, _ in records), 0, 0, 0], pa.int32()),
            "offset": pa.array([*(o for _, _, o in records), 0, 2, 1], pa.int64()),
        }
    )
    rows = job.root / "rows"
    write_deltalake(rows, table)
    for path in job.table.glob("*.parquet"):
        path.unlink()
    shutil.copytree(rows, job.table, dirs_exist_ok=True)
    (job.table / "_delta_log" / f"{1:020d}.json").unlink()
    found = inspect(job.checkpoints, [job.table], OffsetColumns("partition", "offset", "topic"))
    lacking = [span for each in found.findings for span in each.spans if each.kind in ("missing", "unknown")]
    assert [(s.partition, s.start, s.end) for s in lacking if s.topic == "returns"] == [(0, 1, 2)]


@pytest.mark.parametrize("scheme", ["file:", "file://", "file://host", "dbfs:", "s3://", ""])
def test_files_of_a_shallow_clone_are_looked_for_where_they_are(plain_job: MakeJob, scheme: str) -> None:
    job = plain_job()
    job.run(3)
    path = next(iter(job.live))
    elsewhere = job.root / "else where"
    elsewhere.mkdir()
    shutil.move(job.table / path, elsewhere / path)
    for log in (job.table / "_delta_log").glob("*.json"):
        log.write_text(log.read_text().replace(f'"path":"{path}"', f'"path":"{scheme}{quote(str(elsewhere / path))}"'))
    assert reasons(look(job)) == []
    (elsewhere / path).unlink()
    assert ("missing", "certain", "lost_file") in reasons(look(job)) or scheme not in ("file:", "file://")


def test_losses_that_somebody_has_read_again_are_none_by_the_rows(plain_job: MakeJob) -> None:
    job = plain_job("sink")
    job.run(5)
    job.restore(job.version - 1)
    assert look(job).alarming
    missing = sorted(job.missing)
    job.commit("WRITE", {"mode": "Append", "partitionBy": "[]"}, add=[missing])
    assert not inspect(job.checkpoints, [job.table], COLUMNS).alarming


def read(job: PlainJob, first: int, last: int) -> OffsetRange:
    """The offsets of some batches."""
    return OffsetRange(TOPIC, "id", dict(enumerate(job.batches[first].start)), dict(enumerate(job.batches[last].end)))


def note_entry(job: PlainJob, version: int, entry: LedgerEntry) -> None:
    """Make a commit one of Recourse."""
    path = job.table / "_delta_log" / f"{version:020d}.json"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["commitInfo"]["userMetadata"] = entry.encode()
    path.write_text("\n".join(map(json.dumps, lines)))


def test_the_rows_of_a_recovery_take_the_place_of_the_batches_that_it_has_replayed(plain_job: MakeJob) -> None:
    job = plain_job("append")
    job.run(3)
    rows = [job.files[path] for path in list(job.live)[1:]]
    job.commit("WRITE", {"mode": "Append"}, add=rows, remove=list(job.live)[1:])
    for number in range(3):
        note_entry(job, number, LedgerEntry("batch", "orders", "table", 1, number, (read(job, number, number),)))
    note_entry(job, 3, LedgerEntry("publish", "orders", "table", 2, 2, (read(job, 1, 2),)))
    assert reasons(look(job)) == []


def test_commits_of_recourse_have_their_offsets_with_them(plain_job: MakeJob) -> None:
    job = plain_job("append")
    job.run(3)
    for number in range(3):
        note_entry(job, number, LedgerEntry("batch", "orders", "table", 1, number, (read(job, number, number),)))
    found = look(job)
    assert [write.how for write in found.tables[0].attribution.writes] == ["ledger"] * 3 and not found.alarming
    (job.checkpoint / "offsets" / "1").unlink()
    assert not look(job).alarming


@pytest.mark.parametrize(
    ("earliest", "latest", "reason"),
    [(0, 100, None), (50, 100, "past_retention"), (0, 1, "topic_recreated")],
)
def test_topics_are_compared_with_the_position(
    plain_job: MakeJob, earliest: int, latest: int, reason: str | None
) -> None:
    job = plain_job()
    job.run(3)
    bounds = OffsetBounds({0: earliest, 1: earliest}, {0: latest, 1: latest})
    found = beside_topics(look(job), {TOPIC: bounds})
    assert [each.reason for each in found.findings] == ([] if reason is None else [reason] * 2)
    assert found.alarming is (reason is not None)
    assert [each.position for each in found.topics] == job.position
    gone = beside_topics(look(job), {TOPIC: None})
    assert [each.reason for each in gone.findings] == ["topic_gone"] * 2 and not gone.alarming


@pytest.mark.parametrize("kill", ["planned", "written"])
def test_records_of_a_batch_that_was_not_written_are_lost_once_kafka_has_deleted_them(
    plain_job: MakeJob, kill: Literal["planned", "written"]
) -> None:
    job = plain_job()
    job.run(4, kill=kill)
    start, end = job.batches[3].start, job.batches[3].end
    bounds = OffsetBounds(dict(enumerate(end)), {p: offset + 9 for p, offset in enumerate(end)})
    found = beside_topics(look(job), {TOPIC: bounds})
    lost = {} if kill == "written" else {p: end[p] - start[p] for p in range(2) if end[p] > start[p]}
    assert {each.partition: each.lost for each in found.topics if each.lost} == lost
    assert [each.reason for each in found.findings if each.kind == "will_lose"] == ["past_retention"] * len(lost)
    shorter = beside_topics(look(job), {TOPIC: OffsetBounds({0: 0, 1: 0}, dict(enumerate(start)))})
    assert "topic_recreated" in {each.reason for each in shorter.findings}, "an end before that of the planned batch"


def test_the_page_has_the_verdict_the_findings_and_a_picture_and_escapes_names(plain_job: MakeJob) -> None:
    job = plain_job("append")
    job.run(4, kill="written")
    job.run(2)
    job.table.rename(job.root / "<table>")
    job.table = job.root / "<table>"
    found = look(job)
    html = page(found)
    assert found.verdict in html and "ran more than once" in html and "<svg" in html
    assert "&lt;table&gt;" in html and "<table>" not in html.replace('<div class="wide"><table>', "")
    assert all(kind in MEANINGS for kind, _, _ in reasons(found))


def test_a_job_that_replaces_its_whole_table_with_each_batch_loses_nothing_by_that(plain_job: MakeJob) -> None:
    job = plain_job("sink")
    for number in range(4):
        job.run(1)
        if number:
            path = job.table / "_delta_log" / f"{number:020d}.json"
            text = path.read_text().replace('"outputMode":"Append"', '"outputMode":"Complete"')
            removed = [json.dumps({"remove": {"path": old, "dataChange": True}}) for old in job.before[number - 1]]
            path.write_text(text + "\n".join(removed))
    assert reasons(look(job)) == []


def test_an_overwrite_of_another_program_has_removed_the_batches_before_it(plain_job: MakeJob) -> None:
    job = plain_job("sink")
    job.run(3)
    job.commit("WRITE", {"mode": "Overwrite"}, add=[[(-1, -1, 1)]], remove=list(job.live))
    job.run(2)
    found = look(job)
    assert only(found, "taken_out").batches == (0, 1, 2) and only(found, "taken_out").kind == "removed"
    assert not found.alarming


def test_files_with_times_from_before_their_batches_are_not_believed(plain_job: MakeJob) -> None:
    job = plain_job("append")
    job.run(5, kill="written")
    job.run(2)
    for path in job.checkpoint.rglob("*"):
        os.utime(path, (1_000_000, 1_000_000))
    assert [each.reason for each in look(job).findings] == ["ran_again"]


def test_a_batch_of_which_everything_was_filtered_is_no_loss(plain_job: MakeJob) -> None:
    job = plain_job("append")
    for number in range(6):
        job.run(1)
        rows = job.files[list(job.files)[-1]]
        if number == 3:
            (job.table / "_delta_log" / f"{job.version:020d}.json").unlink()
            job.live.popitem()
            job.before.pop()
        else:
            path = job.table / "_delta_log" / f"{job.version:020d}.json"
            count = f'"numOutputRows":"{len(rows)}"'
            path.write_text(path.read_text().replace(count, f'"numOutputRows":"{len(rows) - 1}"'))
    found = look(job)
    assert ("missing", "unclear", "not_written") in reasons(found) and not found.alarming


@pytest.mark.parametrize("kind", ["sink", "append", "append-once", "merge"])
def test_a_job_that_runs_meanwhile_has_neither_lost_nor_doubled_anything(
    plain_job: MakeJob, monkeypatch: pytest.MonkeyPatch, kind: JobKind
) -> None:
    job = plain_job(kind)
    job.run(6)
    read_at_once = inspection.read_checkpoint

    def read_checkpoint_late(folder: Any) -> Any:
        job.run(2)
        history = read_at_once(folder)
        job.run(2)
        job.retain(5)
        return history

    monkeypatch.setattr(inspection, "read_checkpoint", read_checkpoint_late)
    assert reasons(look(job)) == []
