"""Checks that sensors evaluate from files: their verdicts, and the definitions that report them to Dagster.

A verdict is stored without a run when it changes, and periodically while it does not, so that its age shows that the
sensor still runs. The last report is read from Dagster's own storage: after a person has executed the check, or wiped
the asset, the verdict is reported again.

(No postponed annotations here: Dagster looks at the type of a step's `context`.)
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from orchestration.sessions.decisions import CLOCKS_DIFFER
from orchestration.sessions.names import named
from orchestration.sessions.ownership import claim
from orchestration.sessions.reporting import NO_RUN
from streaming_jobs.settings import Settings

RUN = "run"
"""Metadata key: the run that produced the verdict."""
LOOK_EVERY = 15
"""Seconds between two ticks of a sensor."""
AGAIN_AFTER, OTHER_WORDS_AFTER = 300.0, 60.0
"""Seconds after which an unchanged verdict is reported again, and one of which only the text has changed."""


@dataclass(frozen=True)
class CheckVerdict:
    """The outcome of a check. `mark` changes only when a verdict from files does; `figures` are shown."""

    passed: bool
    severity: dg.AssetCheckSeverity
    mark: str
    text: str
    figures: Mapping[str, dg.MetadataValue] = field(default_factory=dict)

    def evaluation(self, key: dg.AssetCheckKey, run: str = "") -> dg.AssetCheckEvaluation:
        """The verdict as an event without a step; `run` produced it."""
        return dg.AssetCheckEvaluation(asset_key=key.asset_key, check_name=key.name, **self._fields(run))

    def result(self, key: dg.AssetCheckKey, run: str = "") -> dg.AssetCheckResult:
        """The verdict as the result of a step; `run` produced it."""
        return dg.AssetCheckResult(asset_key=key.asset_key, check_name=key.name, **self._fields(run))

    def _fields(self, run: str) -> dict[str, Any]:
        mark = {"verdict": dg.MetadataValue.text(self.mark)} if self.mark else {}
        of_run = {RUN: dg.MetadataValue.dagster_run(run)} if run else {}
        return {
            "passed": self.passed,
            "severity": self.severity,
            "description": self.text,
            "metadata": {**mark, **self.figures, **of_run},
        }


CheckVerdicts = Mapping[dg.AssetCheckKey, CheckVerdict]


def checks_from_files(
    step: str,
    descriptions: Mapping[dg.AssetCheckKey, str],
    settings: Settings,
    look: Callable[[dg.DagsterInstance, float], CheckVerdicts],
    *,
    sensor: str,
    sensor_description: str,
    all_well: str,
    in_words: Callable[[dg.AssetCheckKey, CheckVerdict], str] = lambda _, verdict: verdict.text,
    seen: Callable[[dg.DagsterInstance, CheckVerdicts], None] = lambda *_: None,
) -> dg.Definitions:
    """The checks, and the sensor that reports changes; executing a check in the UI evaluates it at once.

    `look` gets the time in seconds since 1970; `seen` is called at each tick with what it returned, `in_words` is a
    check that has not passed in the tick's summary.
    """
    if not descriptions:
        return dg.Definitions()

    @dg.multi_asset_check(
        name=named(settings.dagster, step),
        specs=[
            dg.AssetCheckSpec(key.name, asset=key.asset_key, description=text) for key, text in descriptions.items()
        ],
        can_subset=True,
    )
    def look_now(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        claim(context.instance, context.run.run_id, settings, step)
        verdicts = look(context.instance, time.time())
        for key in context.selected_asset_check_keys:
            yield verdicts[key].result(key)

    @dg.sensor(
        name=named(settings.dagster, sensor),
        minimum_interval_seconds=LOOK_EVERY,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=sensor_description,
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        now = time.time()
        verdicts = look(context.instance, now)
        events = to_report(context.instance, verdicts, now)
        seen(context.instance, verdicts)
        not_passed = sorted({in_words(key, verdict) for key, verdict in verdicts.items() if not verdict.passed})
        # Dagster shows a skip reason also beside reported events: it carries the summary of the tick.
        return dg.SensorResult(asset_events=events, skip_reason="; ".join(not_passed) or all_well)

    return dg.Definitions(asset_checks=[look_now], sensors=[tick])


def to_report(instance: dg.DagsterInstance, verdicts: CheckVerdicts, now: float) -> list[dg.AssetCheckEvaluation]:
    """The verdicts that Dagster does not have yet, or received more than `AGAIN_AFTER` seconds ago."""
    known: Any = instance.event_log_storage.get_latest_asset_check_execution_by_key(list(verdicts))
    return [verdict.evaluation(key) for key, verdict in verdicts.items() if not _is_known(known.get(key), verdict, now)]


def _is_known(record: Any, verdict: CheckVerdict, now: float) -> bool:
    if record is None:
        return verdict.mark == "never started"  # a stream that was never started needs no report
    evaluation = record.evaluation
    if record.run_id != NO_RUN or evaluation is None:
        return False  # executed by a person: it would not count for the next materialisation
    mark = evaluation.metadata.get("verdict")
    age = now - record.create_timestamp
    patience = AGAIN_AFTER if evaluation.description == verdict.text else OTHER_WORDS_AFTER
    return mark is not None and mark.value == verdict.mark and -CLOCKS_DIFFER <= age < patience
