"""The findings of preflight: all at once, each with its next step, and the error that they become."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from streaming_jobs.errors import OffsetsLost, PreflightRefused
from streaming_jobs.ledger.entry import CodeVersion
from streaming_jobs.preflight.findings import StartFinding, enforce, not_deployed
from streaming_jobs.preflight.rules import check_start
from streaming_jobs.preflight.snapshot import StreamSnapshot
from streaming_jobs.state.stream_history import Deploy
from streaming_jobs.state.stream_record import CodeSince
from tests.support.worlds import (
    CODE,
    PRIMARY,
    SECONDARY,
    entry,
    foreign,
    fresh,
    record,
    settled,
    with_table,
    with_topic,
)

Severity = Literal["refuse", "lost", "warn"]


def test_all_of_what_is_wrong_is_said_at_once_and_a_fence_with_both_ways_on() -> None:
    snapshot = with_table(settled(7), PRIMARY, foreign=(foreign(12, "RESTORE"), foreign(13, "DELETE")))
    snapshot = with_topic(with_table(snapshot, SECONDARY, table_id="another"), topic_id=None)
    text = " ".join(f.found for f in check_start(snapshot))
    assert all(part in text for part in ("(RESTORE)", "(DELETE)", "another table", "does not exist"))
    fence = replace(entry(7), kind="fence", plan="parity-0001")
    steps = " ".join(f.next_step for f in check_start(with_table(settled(7), PRIMARY, entry=fence)))
    assert "recourse recover resume parity-0001" in steps and "recourse recover abort parity-0001" in steps


def test_a_renamed_stream_is_told_once_for_each_table_and_how_to_keep_its_name() -> None:
    snapshot = with_table(
        settled(7), PRIMARY, owner="evens_before", foreign=tuple(foreign(n, "WRITE") for n in range(9))
    )
    findings = [f for f in check_start(snapshot) if PRIMARY in f.found]
    assert len(findings) == 1 and "belongs to stream evens_before" in findings[0].found
    assert "@stream(name='evens_before', ...)" in findings[0].next_step
    assert not any("accept" in f.next_step for f in check_start(snapshot))


def test_starting_over_names_the_folders_and_what_it_costs() -> None:
    snapshot = replace(
        with_topic(settled(7), topic_id="new"), folders=(Path("/state/parity"), Path("/tables/my evens"))
    )
    (start_over,) = check_start(snapshot)
    assert "move /state/parity '/tables/my evens' away (readers lose these rows" in start_over.next_step
    assert start_over.next_step.endswith("run `recourse streams run parity`")


def finding(severity: Severity, text: str, step: str = "do this") -> StartFinding:
    return StartFinding(severity, text, step)


def test_warnings_alone_or_nothing_let_the_stream_start_and_lost_records_are_an_error_of_their_own() -> None:
    assert enforce([]) == []
    assert enforce([finding("warn", "short retention", "set it")]) == ["short retention: set it"]
    with pytest.raises(OffsetsLost, match="offsets 1 to 2 are gone"):
        enforce([finding("lost", "offsets 1 to 2 are gone"), finding("warn", "short retention")])


def test_lost_records_with_something_else_are_a_permanent_refusal_that_says_all_and_each_step_once() -> None:
    with pytest.raises(PreflightRefused) as refused:
        enforce([finding("lost", "gone", "start over"), finding("refuse", "restored", "undo it"), finding("warn", "w")])
    assert refused.value.found == "gone; restored"
    assert refused.value.next_step == "start over; or undo it"
    with pytest.raises(PreflightRefused) as refused:
        enforce([finding("refuse", "a")])
    assert refused.value.exit_code == 78
    with pytest.raises(PreflightRefused) as refused:
        enforce([finding("refuse", "a"), finding("refuse", "b")])
    assert refused.value.next_step == "do this"


NEW = CodeVersion("2-0a1b2c3d4e5f", "0.1.0", "0a1b2c3d4e5f")
RAN = replace(settled(7), record=record(code=(CodeSince(CODE.hash, CODE.package, 1, 0, 1.7e9),)))
PUBLISHED = with_table(RAN, PRIMARY, entry=replace(entry(7), kind="publish", code=NEW))


def deployed(after: str) -> Deploy:
    return Deploy(1.7e9, CODE.hash, after, "anna")


@pytest.mark.parametrize(
    ("snapshot", "code", "last", "starts"),
    [
        (fresh(), NEW, None, True),
        (RAN, CODE, None, True),
        (RAN, CODE._replace(package="0.2.0"), None, True),
        (RAN, CODE, deployed("2-ffffffffffff"), True),
        (RAN, NEW, deployed(NEW.hash), True),
        (RAN, NEW, deployed(NEW.formerly), True),
        (PUBLISHED, NEW, None, True),
        (RAN, NEW, None, False),
        (RAN, NEW, deployed("2-ffffffffffff"), False),
        (with_table(RAN, PRIMARY, entry=replace(entry(7), kind="slice", code=NEW)), NEW, None, False),
    ],
)
def test_other_code_starts_only_after_a_deploy_or_a_recovery(
    snapshot: StreamSnapshot, code: CodeVersion, last: Deploy | None, starts: bool
) -> None:
    assert bool(list(not_deployed(snapshot, code, last))) is not starts
