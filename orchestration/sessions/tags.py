"""Tags of runs, by which the run worker, the sensors and `recourse up` exchange information."""

from __future__ import annotations

WORKER_TAG = "recourse/worker"
"""Host, pid and start time of the run worker, by which the watchdog checks that it still runs."""

LOCATION_TAG = "recourse/location"
"""Id of the home that the run belongs to (`ownership.py`): other code locations may have jobs of the same name."""

HEARTBEAT_TAG = "recourse/heartbeat"
"""When the run's worker last reported (seconds since 1970): for a watchdog that cannot look at the worker's host."""

SESSION_TAG = "recourse/session"
"""The job whose session the run is; a run launched from a table's page, which has no job, gets it when it begins."""

FAILURE_TAG = "recourse/failure"
"""`permanent` or `lease_busy`, for keepalive."""

FINGERPRINT_TAG = "recourse/fingerprint"
"""Fingerprint of the configuration and code that failed for good; keepalive tries again when it has changed."""

STOPPED_BY_TAG = "recourse/stopped_by"
"""`shutdown` when `recourse up` ended the run, so that the next one starts the session again."""

KIND_TAG = "recourse/kind"
"""`continuous`, `scheduled` or `manual`: how the job of a session is started; `quality` for a run of suites;
`recovery`, `preview`, `slices` for those jobs; `health` and `rules` for a check executed from its page."""

SESSION_KINDS = ("continuous", "scheduled", "manual")
KINDS = (*SESSION_KINDS, "quality", "recovery", "preview", "slices", "health", "rules")

QUALITY_KIND = "quality"
"""Value of `KIND_TAG`; dagster.yaml lets one run that has it run at a time."""

RECOVERY_KIND = "recovery"
"""Value of `KIND_TAG` for a run of the job `recover`."""

PLAN_TAG = "recourse/plan"
"""Id of the plan that a run of the job `recover` made or works on."""

STAGE_TAG = "recourse/stage"
"""The stage in which that plan is, and the plan's outcome when the run has ended."""

WAITS_FOR_TAG = "recourse/waits_for"
"""Id of the running session that this queued run waits for."""
