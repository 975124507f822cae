"""What a supervised session has beside its streams: the watch over its code, and the means to start streams again."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TypedDict

from streaming_jobs.runtime.code_watch import CodeWatch
from streaming_jobs.runtime.handover import Handover
from streaming_jobs.runtime.query_stop import LINGERING
from streaming_jobs.runtime.session_options import Selection
from streaming_jobs.runtime.split_sessions import SplitSessions
from streaming_jobs.settings import Settings, configuration
from streaming_jobs.stream import Stream


class Supervision(TypedDict, total=False):
    """Arguments of a session."""

    handover: Handover | None
    split: SplitSessions | None
    left_out: Sequence[Stream]


def supervision(
    options: argparse.Namespace,
    settings: Settings,
    streams: Sequence[Stream],
    selection: Selection,
    began: float,
    *,
    in_process: bool,
) -> Supervision:
    """The arguments of a session; empty without `--supervised`. `began` is from before the code was loaded.

    `in_process`: the command line of this process is that of the session, so that it can be started once more.
    """
    if not options.supervised:
        return {}
    watch: CodeWatch | None = None
    split: SplitSessions | None = None
    if in_process:
        config = configuration(options.config)
        watch = CodeWatch([*sys.orig_argv, "--print-versions"], settings, streams, config)
        if settings.spark.split_sessions:
            longest = max(settings.for_stream(s.name).stop_deadline.total_seconds() for s in streams)
            split = SplitSessions(sys.orig_argv, longest + LINGERING)
    names = [stream.name for stream in selection.left_out]
    handover = Handover(settings, selection.recovering, watch, left_out=names, began=began)
    return {"handover": handover, "split": split, "left_out": selection.left_out}
