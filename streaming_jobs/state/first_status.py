"""The status that a session begins with, from the stream's files."""

from __future__ import annotations

import os
import time

import structlog

from streaming_jobs.errors import PreflightRefused
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_record
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.state.status import Status, read_status
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.totals import Totals, totals_from

log = structlog.get_logger()

_CARRIED_OVER = (
    "batch",
    "committed_at",
    "batch_ms",
    "batch_records",
    "progress_at",
    "lag_at",
    "lag_records",
    "lag_s",
    "lag_partitions",
    "read_up_to",
    "watermark",
    "watermark_delay_s",
    "state_rows",
    "state_mb",
    "code_version",
    "last_error",
)
"""Figures that stay valid, with their age, until this session has newer ones. Rates do not: they are per session."""


def first_status(settings: Settings, stream: str) -> Status:
    """The status of a session that begins now, in this process; preflight reports files that cannot be read."""
    now = time.time()
    run = os.environ.get("RECOURSE_RUN_ID")
    status = Status(stream, pid=os.getpid(), run_id=run, started_at=now, heartbeat=now)
    before = read_status(settings, stream)
    if before is not None:
        for name in _CARRIED_OVER:
            setattr(status, name, getattr(before, name))
        status.generation = before.generation
    try:
        record = stream_record.load(settings, stream)
    except PreflightRefused:
        record = None
    if record is not None:
        status.generation = record.generation
        status.batch = StreamFolder.of(settings, stream).checkpoint(record.generation).last_committed
    known = before.totals if before is not None else None
    try:
        file = LedgerFile(StreamFolder.of(settings, stream).ledger)
        status.totals = totals_from(file, stream, known, now)
    except (OSError, EOFError, ValueError, KeyError) as error:  # a figure is no reason to keep a stream from running
        log.warning("the ledger file could not be counted; totals go on without it", stream=stream, reason=repr(error))
        status.totals = known or Totals(now)
    return status
