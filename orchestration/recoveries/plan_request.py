"""The request for a plan, as a person makes it on the command line or in the Launchpad, and the plan made from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from streaming_jobs.errors import UsageError

if TYPE_CHECKING:
    from reprocessing.planning.planner import Request
    from reprocessing.plans.plan import Checks, RecoveryPlan
    from streaming_jobs.catalog.topology import Topology
    from streaming_jobs.settings import Settings
    from streaming_jobs.sources.topics import Topics
    from streaming_jobs.stream import Stream

TARGETS: Mapping[str, str] = {
    "to-earliest": "earliest",
    "to-latest": "latest",
    "to-offsets": "offsets",
    "from-file": "file",
    "shift-by": "shift-by",
    "by-duration": "duration",
    "to-datetime": "datetime",
    "to-batch": "batch",
    "to-table-version": "table-version",
    "savepoint": "savepoint",
    "before-code": "code",
    "before-first-bad": "first-bad",
    "before-first-broken": "first-broken",
}
"""The options that name a target, each with the kind of target that it stands for."""
OF_ANY_STREAM = ("earliest", "latest", "offsets", "file", "shift-by", "duration", "datetime")
"""Kinds of targets that mean the same for several streams; the others name a thing of one stream.

A named savepoint is one of each of its streams.
"""


@dataclass(frozen=True)
class PlanRequest:
    """The streams to put right, in this order; the target, by kind; and the checks before publishing.

    `max_changed` is a share, such as `5%` or `0.05`, of the published rows; None: any. `until` is the end of a bounded
    recovery, such as `batch 41`. The other fields are the options of `recourse recover plan`.
    """

    streams: tuple[str, ...]
    targets: Mapping[str, str]
    require: tuple[str, ...] = ()
    max_changed: str | None = None
    suites: bool = True
    allow_bad: bool = False
    exact: bool = False
    same_code: bool = False
    discard_state: bool = False
    until: str | None = None
    discard_state_of: tuple[str, ...] = ()
    rebuild: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()

    @property
    def target(self) -> tuple[str, str]:
        """Kind and value of the target; raises UsageError unless there is exactly one."""
        if len(self.targets) != 1:
            raise UsageError(
                f"{len(self.targets)} targets were given: {', '.join(self.targets) or 'none'}", "give exactly one"
            )
        return next(iter(self.targets.items()))


def make_requested(
    settings: Settings, topology: Topology, topics: Callable[[], Topics], request: PlanRequest
) -> RecoveryPlan:
    """The plan for a request, written to disk; nothing of the streams is changed.

    `topics` is called where the broker is needed. Raises UsageError or PreflightRefused with the ways out.
    """
    from reprocessing.planning.downstream import Along
    from reprocessing.planning.planner import make_plan
    from reprocessing.planning.until import until_target
    from streaming_jobs.state import named_savepoints

    kind, value = request.target
    shared = named_savepoints.find(settings, value) if kind == "savepoint" else None
    if not request.streams and shared is not None:
        request = replace(request, streams=tuple(shared.streams))
    if not request.streams:
        raise UsageError("no stream was given", f"name one of {', '.join(topology.streams)}")
    kinds = [kind, *([until_target(request.until).kind] if request.until is not None else [])]
    of_one = [each for each in kinds if each not in OF_ANY_STREAM and not (each == "savepoint" and shared)]
    if len(request.streams) > 1 and (of_one or request.require):
        what = f"the target {of_one[0]}" if of_one else "a condition"
        raise UsageError(
            f"{what} is about one stream, and {len(request.streams)} were given", "make a plan for each of them"
        )
    requests = [_of_stream(settings, topology, topics, request, name) for name in request.streams]
    along = Along(frozenset(request.discard_state_of), frozenset(request.rebuild), frozenset(request.leave))
    topology.select([*along.names])
    return make_plan(
        settings, requests, checks_of=lambda stream: _suites(settings, topology, request, stream), along=along
    )


def share_of(text: str | None) -> float | None:
    """A share such as `5%` or `0.05` as a number from 0 to 1; raises UsageError for anything else."""
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as error:
        raise UsageError(f"--max-changed {text} is not a share", "write 5% or 0.05") from error
    if not 0 <= value <= 1:
        raise UsageError(f"--max-changed {text} is not between 0 and 1", "write 5% or 0.05")
    return value


def _suites(settings: Settings, topology: Topology, request: PlanRequest, stream: Stream) -> Checks:
    """The checks of a stream that the plan takes along: its suites."""
    from orchestration.recoveries.suite_gate import suites_of
    from reprocessing.plans.plan import Checks

    gate = suites_of(settings, topology, stream) if request.suites else []
    return Checks(suites=tuple(suite.name for suite in gate))


def _of_stream(
    settings: Settings, topology: Topology, topics: Callable[[], Topics], request: PlanRequest, name: str
) -> Request:
    """The request for one of the streams, as the planner takes it."""
    from orchestration.recoveries.suite_gate import condition_named, suites_of
    from reprocessing.planning.first_bad_row import before_first_bad
    from reprocessing.planning.offline import look_for_plan
    from reprocessing.planning.planner import Request
    from reprocessing.planning.targets import Target
    from reprocessing.planning.until import until_target
    from reprocessing.plans.plan import Checks

    kind, value = request.target
    until = None if request.until is None else until_target(request.until)
    stream = topology.select([name])[0]
    if kind == "first-broken":
        value = condition_named(settings, topology, stream, value)
    searched = {"first-bad": value, "first-broken": f"({value}) IS NOT TRUE"}.get(kind)
    kept_free = {"first-bad": f"({value}) IS NOT TRUE", "first-broken": value}.get(kind)
    if (request.allow_bad or request.exact) and searched is None:
        raise UsageError(
            "--allow-bad and --exact go with --before-first-bad and --before-first-broken only", "leave them out"
        )
    rules = [*request.require, *([kept_free] if kept_free is not None and not request.allow_bad else [])]
    gate = suites_of(settings, topology, stream) if request.suites else []
    checks = Checks(tuple(dict.fromkeys(rules)), share_of(request.max_changed), tuple(suite.name for suite in gate))
    snapshot = look_for_plan(settings, stream, topics)
    if searched is not None:
        target, resolved = before_first_bad(snapshot, searched, exact=request.exact, same_code=request.same_code)
        return Request(snapshot, target, checks, resolved=resolved, discard_state=request.discard_state, until=until)
    target = Target(kind, value)  # type: ignore[arg-type]
    return Request(
        snapshot, target, checks, discard_state=request.discard_state, same_code=request.same_code, until=until
    )
