"""What a replay says about its progress: more only when more was read, and once what it waits for."""

from __future__ import annotations

from reprocessing.stages.recovery import RecoveryEvents
from reprocessing.stages.replay import ReplayProgress


def test_progress_is_told_when_there_is_some_and_else_what_is_waited_for() -> None:
    now, said = [0.0], list[str]()
    events = RecoveryEvents(tell=said.append, progress=lambda done, total: said.append(f"{done} of {total}"))
    progress = ReplayProgress(events, planned=60, total=100, clock=lambda: now[0])
    for second, (done, batch) in enumerate([(0, 2)] * 40 + [(50, 3)] * 3 + [(100, 4)] * 40):
        now[0] = float(second)
        progress.reached(done, batch)
    assert said == [
        "  replay: 40 records have come since the plan was made, and are read too",
        "0 of 100",
        "  replay: it waits for the commit of batch 3",
        "50 of 100",
        "100 of 100",
        "  replay: it waits for the end of its session",
    ]
