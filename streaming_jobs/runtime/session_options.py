"""The command line of the driver process: its options, and the streams that a start with them runs."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from streaming_jobs.errors import UsageError
from streaming_jobs.runtime import child_sessions
from streaming_jobs.settings import Settings, checked_trigger, flag_value
from streaming_jobs.state.requests import STOP, StreamRequest
from streaming_jobs.storage.log_stream import log_stream
from streaming_jobs.stream import Stream

# The process that started a session with `--supervised`: the session ends when that process has gone.

log = structlog.get_logger()


def watch(stop: threading.Event) -> None:
    """Set `stop` when standard input ends: its other end is the parent's, and closed by the end of the parent."""
    threading.Thread(target=_until_it_has_gone, args=(stop,), name="parent", daemon=True).start()


def _until_it_has_gone(stop: threading.Event) -> None:
    # os.read, not sys.stdin: a thread inside the buffered reader aborts the interpreter at exit.
    while os.read(0, 4096):
        pass
    log.info("standard input ended: the parent is gone")
    stop.set()


# The log of a driver process: one line per event on standard error, in logfmt, or coloured on a terminal.


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


@dataclass(frozen=True)
class Selection:
    """The streams of a start. `answers` are the stop requests, by stream, that this start ends."""

    streams: Sequence[Stream]
    answers: Mapping[str, StreamRequest] = field(default_factory=dict)
    recovering: Sequence[str] = ()
    """Streams that a recovery has stopped."""
    left_out: Sequence[Stream] = ()
    """All streams that were stopped: by a recovery, or on purpose."""


def session_command(arguments: Sequence[str]) -> list[str]:
    """The command line of a driver with these options."""
    return [sys.executable, "-m", "streaming_jobs.session", *arguments]


def supervised_command(streams: Sequence[str], *options: str) -> list[str]:
    """The command line of a driver with these streams; it stops when its standard input, a pipe, ends."""
    return session_command(["--streams", ",".join(streams), "--supervised", *options])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options as given; argparse ends the process for an unknown option."""
    parser = argparse.ArgumentParser(prog="python -m streaming_jobs.session", description="Run streams.")
    parser.add_argument("--streams", default="", help="names, separated by commas; all if left out")
    parser.add_argument("--trigger", help="continuous, available-now, or 'every 10 seconds'")
    parser.add_argument("--config", type=Path, help="configuration file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting; repeatable")
    parser.add_argument("--supervised", action="store_true", help="stop when standard input ends")
    parser.add_argument("--respect-stop", action="store_true", help="leave out streams that were stopped on purpose")
    parser.add_argument("--asked-at", type=float, metavar="SECONDS", help="when this start was asked for, since 1970")
    parser.add_argument("--print-versions", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(child_sessions.STANDBY, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(child_sessions.AGAIN, action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def flags(options: argparse.Namespace) -> dict[str, Any]:
    """The settings among the options; raises UsageError for a setting without a value and for an invalid trigger."""
    if options.trigger is not None:
        try:
            checked_trigger(options.trigger)
        except ValueError as error:
            raise UsageError(
                f"--trigger: {error}", "correct it, or leave it out: the setting `trigger` holds"
            ) from None
    return dict(_assignment(text) for text in options.set)


def requests_before(
    requests: Mapping[str, StreamRequest], asked_at: float | None, now: float
) -> dict[str, StreamRequest]:
    """The stop requests from before the moment this start was asked for; all of them if that moment is not known."""
    if asked_at is None:
        return dict(requests)
    # A time in the future is from before the clock was set back.
    return {name: request for name, request in requests.items() if not asked_at < request.since <= now}


def select(
    options: argparse.Namespace, settings: Settings, streams: Sequence[Stream], requests: Mapping[str, StreamRequest]
) -> Selection:
    """The streams to start, of those named; raises LeaseBusy if this session replaces another and all run elsewhere.

    A start by a person ends earlier stop requests. A start by a supervisor, or by a session that restarts itself,
    respects them.
    """
    if options.standby:  # a recovery will stop them: they start here when it is over
        return Selection([], recovering=[stream.name for stream in streams], left_out=streams)
    if not (options.respect_stop or options.again):
        return Selection(streams, requests)
    recovering = [s.name for s in streams if STOP.for_recovery(settings, s.name)]
    left_out = [s for s in streams if s.name in recovering or STOP.asked(settings, s.name)]
    streams = [s for s in streams if s not in left_out]
    if options.again and streams:
        streams = child_sessions.free(settings, streams)
    return Selection(streams, recovering=recovering, left_out=left_out)


def _assignment(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign:
        raise UsageError(f"--set {text}: no value", "write --set key=value")
    return key, flag_value(key, value)
