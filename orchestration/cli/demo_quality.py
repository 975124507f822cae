"""`recourse demo quality`: a check turns red, names the batch, the code and the command, and turns green again."""

from __future__ import annotations

import json
import re
import shlex
import time

from orchestration.cli.demo import RIGHT, WRONG, Story
from streaming_jobs.errors import PermanentError

SUITES = ("quality.examples.stock",)
_SUITE = "inventory_rows"
_RED = 1


def tell(story: Story) -> None:
    """Run all steps: right rows, a bug, a red check, its command, the gate, green."""
    half = len(story.all) // 2
    story.say(f"{half:,} stock movements come in; the stream inventory reads them, its suite looks at the table")
    story.begin()
    story.feed(story.all[:half])
    story.run_streams(["inventory"])
    story.recourse("quality", "run", _SUITE)
    story.say("a new version of the function is deployed. It takes returns and corrections for sales")
    story.deploy(WRONG)
    story.feed(story.all[half:])
    story.run_streams(["inventory"])
    command = _offered(story, story.recourse("quality", "run", _SUITE, code=_RED))
    story.say(f"it is red, and offers: {command}")
    story.say("with the wrong code still deployed, a plan is refused")
    story.recourse(*shlex.split(command)[1:], code=2)
    story.say("the function is corrected")
    story.deploy(RIGHT)
    plan = str(json.loads(story.recourse(*shlex.split(command)[1:], "--output", "json", quiet=True))["id"])
    story.recourse("recover", "show", plan)
    story.say("the suite judges the rebuilt rows before they are published")
    story.recourse("recover", "apply", plan, "--yes")
    story.recourse("quality", "run", _SUITE)
    story.recourse("quality", "history", _SUITE)
    story.say(f"done in {time.monotonic() - story.began:.0f} s")


def _offered(story: Story, printed: str) -> str:
    """The command in the output of a red suite."""
    found = re.search(r"next: (recourse recover plan .+)", printed)
    if found is None:
        raise PermanentError("the red suite names no batch", f"look at it: --keep, {story.folder}")
    return found[1]
