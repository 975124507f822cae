"""The log of a driver process: one line per event on standard error, in logfmt, or coloured on a terminal."""

from __future__ import annotations

import logging
import sys

import structlog

from streaming_jobs.log_stream import log_stream


def log_to_stderr() -> None:
    """Set structlog up for this process: of py4j only errors, and nothing that does not fit on the disk."""
    logging.getLogger("py4j").setLevel(logging.ERROR)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], drop_missing=True)
            if not sys.stderr.isatty()
            else structlog.dev.ConsoleRenderer(),
        ],
        logger_factory=lambda *_: structlog.PrintLogger(log_stream(sys.stderr)),
    )
