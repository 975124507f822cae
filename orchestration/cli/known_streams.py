"""The streams of a command that only looks: also where the code on disk cannot be loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestration.cli.invocation import Invocation
from orchestration.cli.output import say

if TYPE_CHECKING:
    from orchestration.cli.observed import Observed


def loadable_or_known(call: Invocation, names: list[str]) -> list[str]:
    """The named streams, or all; those that have run here, if the code on disk cannot be loaded."""
    from orchestration.deploys.starting import streams_of
    from streaming_jobs.errors import UsageError

    try:
        declared = call.topology
    except UsageError as error:
        if not (known := [name for name in streams_of(call.settings) if not names or name in names]):
            raise
        say(f"the code on disk cannot be loaded: {error.found}")
        return known
    return [stream.name for stream in declared.select(dict.fromkeys(names))]


def observed_now(call: Invocation, names: list[str]) -> list[Observed]:
    """These streams now, with the present lag where it can be had."""
    from orchestration.cli.observed import observe_all, with_lag
    from streaming_jobs.errors import UsageError

    observed = observe_all(call.settings, names)
    try:
        streams = [call.topology[name] for name in names]
    except UsageError:  # without its code, the topics of a stream that does not run are not known
        return observed
    return with_lag(call.settings, streams, observed)
