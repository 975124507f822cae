"""The request for a recovery, the same from the command line and from the Launchpad; and what carries it out.

`OPTIONS` is the only table of a plan's options: it makes the command's options and the Launchpad's fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from streaming_jobs.errors import UsageError

if TYPE_CHECKING:
    from reprocessing.plan.plan import Checks, RecoveryPlan
    from reprocessing.plan.planner import RecoveryRequest
    from reprocessing.stages.recovery import Recovery, RecoveryEvents
    from streaming_jobs.catalog.topology import Topology
    from streaming_jobs.settings import Settings
    from streaming_jobs.sources.topics import Topics
    from streaming_jobs.stream import Stream


@dataclass(frozen=True)
class Option:
    """One option of a request for a plan: of the command `recover plan`, and of the Launchpad, where it is a field.

    `help` and `metavar` are the command's; `field` describes it in the Launchpad, if `help` does not. `target` is the
    kind of target that an option names. With type `list[str]` it may be given again; `streams`: by names of streams.
    """

    name: str
    type: Any
    help: str
    metavar: str | None = None
    field: str = ""
    target: str = ""
    default: bool = False
    streams: bool = False

    @property
    def declaration(self) -> str:
        """The option as it is declared for the command."""
        flag = f"--{self.name.replace('_', '-')}"
        return f"{flag}/--no-{self.name}" if self.default else flag

    @property
    def description(self) -> str:
        """The text beside its field in the Launchpad."""
        text = self.field or self.help[0].lower() + self.help[1:].removesuffix(".")
        return f"true: {text}" if self.target and self.type is bool else text


OPTIONS = (
    Option("to_earliest", bool, "The first record that the topic still has.", target="earliest"),
    Option("to_latest", bool, "The topic's end: skip what is not read.", target="latest"),
    Option("to_offsets", str, "Offsets by partition.", "0:120,1:98", "in quotes: '0:120,1:98'", "offsets"),
    Option("from_file", str, "CSV: topic,partition,offset.", "FILE", "a CSV: topic,partition,offset", "file"),
    Option("shift_by", int, "Records in each partition; back: -1000.", "N", target="shift-by"),
    Option("by_duration", str, "That long before now.", "'2 hours'", "that long before now: 2 hours", "duration"),
    Option("to_datetime", str, "ISO time with its zone.", "TIME", "2026-11-21T08:00:00+00:00", "datetime"),
    Option("to_batch", int, "The end of a batch; -1: before the first.", "N", target="batch"),
    Option("to_table_version", int, "A version of the primary table.", "V", target="table-version"),
    Option(
        "savepoint",
        str,
        "A savepoint; one of several streams: each to its own, without STREAM all.",
        "NAME",
        target="savepoint",
    ),
    Option("before_code", str, "Before a version of the code.", "HASH", "its hash, in quotes", "code"),
    Option(
        "before_first_bad",
        str,
        "Before the code that made the first row for which this holds.",
        "SQL",
        target="first-bad",
    ),
    Option(
        "before_first_broken",
        str,
        "The same for a rule that has to hold for every row: SQL, or the name of a row rule or of a suite's "
        "expectation. It is then required.",
        "RULE",
        "a rule that has to hold for every row: SQL, or the name of a row rule or of a suite's expectation",
        target="first-broken",
    ),
    Option(
        "allow_bad",
        bool,
        "With these: publish even if rebuilt rows are bad.",
        field="with before_first_...: publish even if rebuilt rows are bad",
    ),
    Option("same_code", bool, "Replay with today's code although it is what wrote the bad rows."),
    Option(
        "until",
        str,
        "Correct only up to the end of this batch, and leave later rows as they are; also 'datetime TIME', "
        "'code HASH' and other kinds of targets.",
        "'batch N'",
    ),
    Option(
        "exact",
        bool,
        "With these: only before the row's own batch.",
        field="with before_first_...: only before the row's own batch",
    ),
    Option("discard_state", bool, "Begin with empty state; the plan says what will be wrong."),
    Option(
        "discard_state_of",
        list[str],
        "The same for a stream that goes along; may be given again.",
        "STREAM",
        "streams that go along with empty state; the plan says what is wrong",
        streams=True,
    ),
    Option(
        "rebuild",
        list[str],
        "A stream that goes along reads everything anew; may be given again.",
        "STREAM",
        streams=True,
    ),
    Option(
        "leave", list[str], "A stream does not go along, and stays wrong; may be given again.", "STREAM", streams=True
    ),
    Option("require", list[str], "Must hold for every rebuilt row; may be given again.", "SQL"),
    Option("suites", bool, "The stream's suites must pass before it is published.", default=True),
    Option("max_changed", str, "More rows than this may not change, come or go.", "5%"),
)
"""In the order of the command's help. The other fields of the Launchpad say what is done with a plan."""
TARGETS = {option.name: option for option in OPTIONS if option.target}
CHOICES = {option.name: option for option in OPTIONS if not option.target}
"""The fields of `PlanRequest` beside its streams and its target."""
OF_ANY_STREAM = ("earliest", "latest", "offsets", "file", "shift-by", "duration", "datetime")
"""Kinds of targets that apply to several streams; the other kinds name an object of one stream.

A named savepoint is one of each of its streams.
"""


@dataclass(frozen=True)
class PlanRequest:
    """The streams to recover, in this order; the target, by kind; and the checks before publishing.

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

    @classmethod
    def of_options(cls, streams: Iterable[str], options: Mapping[str, Any]) -> PlanRequest:
        """The request of options by name; "", False, None and an empty list mean that an option was not given."""
        chosen: dict[str, Any] = {}
        for name, option in CHOICES.items():
            value = options.get(name)
            if option.type is bool:
                chosen[name] = option.default if value is None else value
            elif option.type == list[str]:
                chosen[name] = tuple(value or ())
            else:
                chosen[name] = None if value in ("", None) else str(value)
        targets = {
            option.target: "" if option.type is bool else str(options[name])
            for name, option in TARGETS.items()
            if options.get(name) is not None and options[name] is not False
        }
        return cls(tuple(dict.fromkeys(streams)), targets, **chosen)

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
    """Write the plan for a request to disk; the streams are not changed.

    `topics` is called where the broker is needed. Raises UsageError or PreflightRefused with the alternatives.
    """
    from reprocessing.plan.affected_streams import Along
    from reprocessing.plan.planner import make_plan
    from reprocessing.plan.replay_range import until_target
    from streaming_jobs.state import savepoint_retention

    kind, value = request.target
    shared = savepoint_retention.find_named(settings, value) if kind == "savepoint" else None
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
    """The checks of a downstream stream of the plan: its suites."""
    from orchestration.recoveries.suite_gate import suites_of
    from reprocessing.plan.plan import Checks

    gate = suites_of(settings, topology, stream) if request.suites else []
    return Checks(suites=tuple(suite.name for suite in gate))


def _of_stream(
    settings: Settings, topology: Topology, topics: Callable[[], Topics], request: PlanRequest, name: str
) -> RecoveryRequest:
    """The request for one of the streams, as the planner takes it."""
    from orchestration.recoveries.suite_gate import condition_named
    from reprocessing.plan.first_bad_row import before_first_bad
    from reprocessing.plan.plan import Checks
    from reprocessing.plan.planner import RecoveryRequest
    from reprocessing.plan.replay_range import until_target
    from reprocessing.plan.snapshot import look_for_plan
    from reprocessing.plan.targets import Target

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
    suites = _suites(settings, topology, request, stream).suites
    checks = Checks(tuple(dict.fromkeys(rules)), share_of(request.max_changed), suites)
    snapshot = look_for_plan(settings, stream, topics)
    if searched is not None:
        target, resolved = before_first_bad(snapshot, searched, exact=request.exact, same_code=request.same_code)
        return RecoveryRequest(
            snapshot, target, checks, resolved=resolved, discard_state=request.discard_state, until=until
        )
    target = Target(kind, value)  # type: ignore[arg-type]
    return RecoveryRequest(
        snapshot, target, checks, discard_state=request.discard_state, same_code=request.same_code, until=until
    )


Action = Literal["plan", "apply", "plan_and_apply", "resume", "undo", "abort"]


@dataclass(frozen=True)
class Launch:
    """What a run of the job `recover` does: one action on a plan, or a request for a new one.

    With `pause` it stops before anything is published; with `stop_first` streams stop before their replay.
    """

    do: Action
    plan: str = ""
    request: PlanRequest | None = None
    pause: bool = False
    stop_first: bool = False

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Launch:
        """The launch from its JSON; raises ValueError for anything else."""
        return msgspec.json.decode(text, type=cls)


def topics_of(settings: Settings) -> Topics:
    from streaming_jobs.platform.broker import bootstrap_servers
    from streaming_jobs.sources.topics import Topics

    return Topics.of(settings.kafka, bootstrap_servers(settings))


def carry_out(
    settings: Settings,
    topology: Topology,
    plan: RecoveryPlan,
    events: RecoveryEvents,
    act: Callable[[Recovery], None],
    begun: Callable[[Recovery], None] = lambda _: None,
) -> Recovery:
    """Open the recovery of a plan, let `act` (apply, resume, give up) work on it, and return it.

    `begun` gets the recovery before `act` does. Suites run in their own Spark session, which ends with this call.
    """
    from orchestration.recoveries.suite_gate import suite_runner
    from reprocessing.executor import recovery_of

    streams = topology.select(plan.names)
    with suite_runner(settings, topology) as run_suite:
        recovery = recovery_of(settings, streams, topics_of(settings), plan, events, run_suite=run_suite)
        begun(recovery)
        act(recovery)
    return recovery


def make_undo(settings: Settings, topology: Topology, name: str) -> RecoveryPlan:
    """The plan that takes the published plan `name` back; raises UsageError if that cannot be done."""
    from reprocessing.plan.plan_file import load
    from reprocessing.plan.planner import plan_undo

    plan = load(settings, name)
    streams = {stream.name: stream for stream in topology.select(plan.names)}
    return plan_undo(settings, streams, topics_of(settings), plan)


def generations(recovery: Recovery) -> dict[str, int]:
    return {each.stream.name: each.record.generation for each in recovery.each()}
