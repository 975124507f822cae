"""Tags that runs carry, which is how the run worker, the sensors and `recourse up` tell each other things."""

from __future__ import annotations

WORKER_TAG = "recourse/worker"
"""Host, pid and start time of the run worker, so that the watchdog can tell whether it lives."""

FAILURE_TAG = "recourse/failure"
"""`permanent` or `lease_busy`, for keepalive."""

FINGERPRINT_TAG = "recourse/fingerprint"
"""Configuration and code that failed for good; keepalive tries again when it has changed."""

STOPPED_BY_TAG = "recourse/stopped_by"
"""`shutdown` when `recourse up` ended the run, so that the next one starts the session again."""

KIND_TAG = "recourse/kind"
"""`continuous`, `scheduled` or `manual`: how the job of a session is started."""

WAITS_FOR_TAG = "recourse/waits_for"
"""Id of the run that was the session when this one was queued behind it."""
