"""A stream that a recovery left out, and that has read what became void: its next start is refused."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from streaming_jobs.preflight.rules import check_start
from streaming_jobs.preflight.snapshot import take_snapshot
from streaming_jobs.state import topic_records
from streaming_jobs.state.topic_records import VoidRange
from tests.support.life import STREAM, TOPIC, TOPIC_ID, Life, Topics


def test_a_stream_that_has_read_what_became_void_without_it_does_not_start(tmp_path: Path) -> None:
    """It was not declared when the recovery was planned; a batch after the range would have left it out."""
    life = Life.of_batches(tmp_path, 3)
    now = time.time()
    read, behind = VoidRange(0, 25, 28, "p-0001", 2, now + 60), VoidRange(0, 30, 40, "p-0001", 2, now + 60)

    def declared(*ranges: VoidRange, topic_id: str = TOPIC_ID) -> list[str]:
        topic_records.declare_void(life.settings, TOPIC, topic_id, writer="w", path=(1, 2), ranges=ranges)
        findings = check_start(take_snapshot(life.settings, STREAM, Topics()))
        return [f"{each.severity}: {each.found}; {each.next_step}" for each in findings]

    assert declared(behind) == []
    (found,) = declared(read)
    assert "refuse: plan p-0001 has declared offsets 25 to 27 of topic things" in found
    assert found.endswith("recourse recover plan things --to-offsets 0:25")
    assert declared(replace(read, at=now - 86_400)) == [], "its batches are later: they left the range out"
    assert declared(replace(read, generation=3)) == [], "it does not hold"
