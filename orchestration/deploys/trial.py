"""The trial of the code on disk as a child process: Spark has to look at it, and a deploy has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from orchestration.deploys.plan import Plan
from streaming_jobs.platform.processes.child import ChildCommand

DEADLINE = 180.0


def tried(plan: Plan, environment: Mapping[str, str], say: Callable[[str], None]) -> Plan:
    """The plan with what a trial of the touched streams would refuse; without a verdict it is as it was."""
    names = [each.stream for each in plan.touched if not each.refused]
    if not names:
        return plan
    verdicts = _verdicts(names, environment)
    if verdicts is None:
        say("the code could not be tried in Spark beforehand; its start shows whether it is refused")
        return plan
    refused = {name: f"{found['found']}: {found['next']}" for name, found in verdicts.items() if found}
    streams = [replace(s, refused=(refused[s.stream],)) if s.stream in refused else s for s in plan.streams]
    return replace(plan, streams=tuple(streams))


def _verdicts(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, dict[str, str] | None] | None:
    arguments = [sys.executable, "-m", "streaming_jobs.runtime.trial", ",".join(names)]
    child = ChildCommand(arguments, {**os.environ, **environment}).start_reaped(subprocess.PIPE)
    try:
        output, _ = child.process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        return None
    finally:
        child.kill()
    for line in reversed(output.decode(errors="replace").splitlines()):
        with suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict) and set(value) == set(names):
                return value
    return None
