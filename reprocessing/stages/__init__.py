"""The stages of a recovery, one small class each; executor and explainer walk the same list. Read `stage.py` first.

Each stage may be run again from its beginning after a kill; its findings are written to the journal. A stage is of one
stream, or of all of the plan's streams together: all streams are fenced before any is rebuilt, and nothing is published
before everything that was rebuilt has been compared.

| stage    | does                                                                 | of   | published rows |
|----------|----------------------------------------------------------------------|------|----------------|
| keep     | takes a savepoint of the stopped stream, for abort and undo          | each | old            |
| fence    | opens the new generation on every table, for this plan alone         | each | old            |
| settle   | waits until no transaction is open in its topics; wrong records are void | each | old            |
| prepare  | makes the new generation's checkpoint and staging tables             | each | old            |
| replay   | runs an ordinary session of the stream into the staging tables       | each | old            |
| combine  | adds the rows after the end of a bounded recovery, as they are       | each | old            |
| audit    | checks rules, compares with the published tables, and asks           | all  | old            |
| confirm  | asks, if nothing was rebuilt that could be compared                  | all  | old            |
| publish  | commits once per table                                               | each | new            |
| skip     | lets checkpoint, tables and record continue at the plan's offsets    | each | old, they stay |
| switch   | moves the stream's record to the new generation                      | each | new            |
| finish   | removes staging; the streams may start                               | all  | new            |

A stream that is rewound has prepare, replay, publish and switch, and combine if its recovery is bounded; one that skips
forward has skip. One that writes topics has settle, and its replay appends the corrected records.
"""

from __future__ import annotations

from collections.abc import Iterator

from reprocessing.plans.plan import RecoveryPlan
from reprocessing.stages.audit import Audit, AuditRefused, Confirm
from reprocessing.stages.bounded import Combine, ContinueGeneration
from reprocessing.stages.clean_up import CleanUp
from reprocessing.stages.rebuild import Prepare, Publish, Replay, SwitchGeneration
from reprocessing.stages.settle import Settle
from reprocessing.stages.skip import Skip
from reprocessing.stages.stage import Stage
from reprocessing.stages.stand_still import Fence, TakeSavepoint

__all__ = [
    "Audit",
    "AuditRefused",
    "CleanUp",
    "Combine",
    "Confirm",
    "ContinueGeneration",
    "Fence",
    "Prepare",
    "Publish",
    "Replay",
    "Settle",
    "Skip",
    "Stage",
    "SwitchGeneration",
    "TakeSavepoint",
    "stages_of",
]


def stages_of(plan: RecoveryPlan) -> tuple[Stage, ...]:
    """The stages of a plan, in order."""
    return tuple(_stages(plan))


def _stages(plan: RecoveryPlan) -> Iterator[Stage]:
    rewound = [each for each in plan.streams if not each.skips]
    skipping = [each for each in plan.streams if each.skips]
    yield from map(TakeSavepoint, plan.streams)
    yield from map(Fence, plan.streams)
    yield from (Settle(each) for each in rewound if each.wrong_from)
    yield from map(Prepare, rewound)
    yield from map(Replay, rewound)
    yield from (Combine(each) for each in rewound if each.until is not None)
    yield Audit(tuple(rewound), tuple(skipping)) if rewound else Confirm(tuple(skipping))
    yield from map(Publish, rewound)
    yield from map(Skip, skipping)
    yield from (SwitchGeneration(each) if each.until is None else ContinueGeneration(each) for each in rewound)
    yield CleanUp(plan.streams)
