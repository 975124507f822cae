"""The journal of a recovery: its lines decide how far it came."""

from __future__ import annotations

from pathlib import Path

from reprocessing.plans.journal import Journal


def test_a_journal_line_that_a_kill_cut_off_counts_as_not_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "plan" / "journal.jsonl")
    assert journal.outcome == "planned"
    journal.write("keep", "begun")
    journal.write("keep", "done", {"savepoint": "x"})
    with journal.path.open("ab") as file:
        file.write(b'{"stage":"fence","sta')
    assert [line.stage for line in journal.lines()] == ["keep", "keep"]
    journal.write("fence", "begun")
    assert journal.done("keep") == {"savepoint": "x"} and journal.begun("fence") and journal.done("fence") is None
    assert journal.outcome == "applying"
    journal.write("audit", "failed", {"error": "no"})
    assert journal.outcome == "refused"
    journal.write("abort", "begun")
    assert journal.outcome == "aborting"
    journal.write("abort", "done")
    assert journal.outcome == "aborted"
