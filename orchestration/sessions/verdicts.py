"""Verdicts that sensors find in files: stored without a run when they change, and from time to time when they do not.

The last report is read from Dagster's own storage, not remembered: after somebody else executed the check, or wiped the
asset, it is reported again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from orchestration.sessions.decisions import CLOCKS_DIFFER
from orchestration.sessions.events import NO_RUN

HEALTH = "health"
"""The name of the check of a stream's tables that says whether the stream is well."""
NOT_TOLD = ("stopped", "recovering", "restarting", "starting", "yellow: disk", "red: disk")
"""Marks of verdicts that nobody has to be told: brought about on purpose, not settled yet, or told for all streams."""
AGAIN_AFTER, OTHER_WORDS_AFTER = 300.0, 60.0
"""Seconds after which a verdict that has not changed is reported again; one whose text has changed."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of the check of a stream's tables. `mark` changes only when the outcome does; `figures` are shown."""

    passed: bool
    severity: dg.AssetCheckSeverity
    mark: str
    text: str
    figures: Mapping[str, dg.MetadataValue] = field(default_factory=dict)

    def evaluation(self, key: dg.AssetCheckKey) -> dg.AssetCheckEvaluation:
        """The verdict on one table, as it is stored."""
        return dg.AssetCheckEvaluation(
            asset_key=key.asset_key,
            check_name=key.name,
            passed=self.passed,
            severity=self.severity,
            description=self.text,
            metadata={"verdict": dg.MetadataValue.text(self.mark), **self.figures},
        )

    def result(self, key: dg.AssetCheckKey) -> dg.AssetCheckResult:
        """The verdict on one table, as a step returns it."""
        stored = self.evaluation(key)
        return dg.AssetCheckResult(
            asset_key=key.asset_key,
            check_name=key.name,
            passed=stored.passed,
            severity=stored.severity,
            description=stored.description,
            metadata=stored.metadata,
        )


def to_tell(
    instance: dg.DagsterInstance, verdicts: Mapping[dg.AssetCheckKey, Verdict], now: float
) -> list[dg.AssetCheckEvaluation]:
    """The verdicts that Dagster does not have yet, or received more than `AGAIN_AFTER` seconds ago."""
    known: Any = instance.event_log_storage.get_latest_asset_check_execution_by_key(list(verdicts))
    return [verdict.evaluation(key) for key, verdict in verdicts.items() if not _is_known(known.get(key), verdict, now)]


def _is_known(record: Any, verdict: Verdict, now: float) -> bool:
    if record is None:
        return verdict.mark == "never started"  # a stream that was never started needs no report
    evaluation = record.evaluation
    if record.run_id != NO_RUN or evaluation is None:
        return False  # executed by a person: it would not count for the next materialisation
    mark = evaluation.metadata.get("verdict")
    age = now - record.create_timestamp
    patience = AGAIN_AFTER if evaluation.description == verdict.text else OTHER_WORDS_AFTER
    return mark is not None and mark.value == verdict.mark and -CLOCKS_DIFFER <= age < patience
