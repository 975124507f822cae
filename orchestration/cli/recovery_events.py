"""A recovery as the command line shows it while it is carried out: stages, progress, differences, and the question."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from orchestration.cli.output import say
from orchestration.recoveries.words import Pace, difference_lines

if TYPE_CHECKING:
    from reprocessing.stages.recovery import Recovery, RecoveryEvents

_DOING = {"rewind": "publish the rebuilt rows", "skip": "skip these records"}


def recovery_events(yes: bool) -> RecoveryEvents:
    """Everything is said on stderr; with `yes` nobody is asked."""
    from reprocessing.stages.recovery import RecoveryEvents

    def confirm(recovery: Recovery) -> bool:
        for difference in recovery.differences:
            for line in difference_lines(difference):
                say(line)
        if yes:
            return True
        kinds = {each.kind for each in recovery.plan.streams}
        doing = [words for kind, words in _DOING.items() if kind in kinds]
        return typer.confirm(f"{' and '.join(doing)} (plan {recovery.plan.id})?", err=True)

    pace = Pace()
    return RecoveryEvents(tell=say, progress=lambda *done: say(f"  replay: {pace.words(*done)}"), confirm=confirm)
