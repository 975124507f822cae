"""The trial of the code on disk as a child process: Spark has to look at it, and a deploy has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from orchestration.deploys.plan import Plan
from streaming_jobs.platform.processes.child import ChildCommand

DEADLINE = 180.0


def tried(plan: Plan, environment: Mapping[str, str], say: Callable[[str], None], *, required: bool) -> Plan:
    """The plan with what a trial of its streams would refuse; a trial without a verdict refuses them if `required`."""
    names = [each.stream for each in plan.due if not each.refused]
    if not names:
        return plan
    verdicts = _verdicts(names, environment)
    if verdicts is not None:
        return plan.refusing({name: f"{found['found']}: {found['next']}" for name, found in verdicts.items() if found})
    if required:
        reason = "the trial in Spark gave no verdict: run `recourse doctor`, or deploy without it: --no-trial"
        return plan.refusing(dict.fromkeys(names, reason))
    say("the code could not be tried in Spark beforehand; its start shows whether it is refused")
    return plan


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
