"""The journal of a recovery: its lines decide how far it came."""

from __future__ import annotations

import json
from pathlib import Path

from reprocessing.plan.journal import Journal


def test_a_journal_line_that_a_kill_cut_off_counts_as_not_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "plan" / "journal.jsonl")
    assert journal.outcome == "planned"
    journal.write("take_savepoint", "begun")
    journal.write("take_savepoint", "done", {"savepoint": "x"})
    with journal.path.open("ab") as file:
        file.write(b'{"stage":"fence","sta')
    assert [line.stage for line in journal.lines()] == ["take_savepoint", "take_savepoint"]
    journal.write("fence", "begun")
    assert (
        journal.done("take_savepoint") == {"savepoint": "x"}
        and journal.begun("fence")
        and journal.done("fence") is None
    )
    assert journal.outcome == "applying"
    journal.write("audit", "failed", {"error": "no"})
    assert journal.outcome == "refused"
    journal.write("abort", "begun")
    assert journal.outcome == "aborting"
    journal.write("abort", "done")
    assert journal.outcome == "aborted"


def test_a_journal_of_an_earlier_version_is_continued(tmp_path: Path) -> None:
    """Its stages have other names, and its lines no stream if the plan has only one."""
    journal = Journal(tmp_path / "journal.jsonl")
    lines = [
        {"stage": stage, "state": "done", "at": 1.0, "found": {"stage": stage}}
        for stage in ("keep", "settle", "combine", "switch")
    ]
    journal.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    now = ("take_savepoint", "void_records", "add_later_rows", "switch_generation", "continue_generation")
    assert [journal.of("things").done(stage) for stage in now] == [
        {"stage": stage} for stage in ("keep", "settle", "combine", "switch", "switch")
    ]
    assert journal.done("take_savepoint", "things") is not None and journal.outcome == "applying"
    journal.of("things").write("fence", "begun")
    assert journal.begun("fence", "things") and not journal.begun("fence", "others") and not journal.begun("fence")
    journal.write("finish", "done")
    assert journal.outcome == "published" and journal.of("things").outcome == "published"
