"""The plan of a deploy: per stream the code that runs, the code on disk, what differs, and what would refuse it.

`make_plan` reads files only; the code on disk is that which this process has just loaded. A stream is touched if a
session runs it with other code, or other settings, than those on disk, or if it has failed with other code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from streaming_jobs.catalog.topology import Topology
from streaming_jobs.preflight.rules import other_tables
from streaming_jobs.preflight.snapshot import CheckpointSnapshot, StreamSnapshot, TableSnapshot, TopicSnapshot
from streaming_jobs.preflight.topic_rules import other_topics
from streaming_jobs.runtime import declaration
from streaming_jobs.runtime.code_version import loaded_code
from streaming_jobs.runtime.state_changes import ChangeKind
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import Role
from streaming_jobs.sinks.tables import all_tables
from streaming_jobs.state import stream_record
from streaming_jobs.state.health import HealthFacts, look
from streaming_jobs.state.status import streams_with_status
from streaming_jobs.stream import Stream
from streaming_jobs.text import commands

Action = Literal["deploy", "rebuild", "same", "not running", "new", "removed", "recovering"]


@dataclass(frozen=True)
class StreamDeploy:
    """One stream of a plan. `before` and `after` are hashes; `beside` are the other streams of its process.

    `since`: when the code on disk changed, as its session found (seconds since 1970).
    `record`: the stream is stopped, and its next start needs the record of this deploy (`stream.require_deploy`).
    `change`: what the new code means for the stream's state, for the reason `why`; `columns`: what it means for the
    columns of tables. `rebuild`: the recovery that rebuilds the state, its cost and what it would lose, in words;
    `rebuildable`: nothing but its state refuses the new code; `lost`: the records that are gone.
    """

    stream: str
    action: Action
    before: str = ""
    after: str = ""
    changes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    pid: int | None = None
    beside: tuple[str, ...] = ()
    since: float | None = None
    note: str = ""
    record: bool = False
    change: ChangeKind = "known after a preview"
    why: str = ""
    columns: tuple[str, ...] = ()
    rebuild: tuple[str, ...] = ()
    rebuildable: bool = False
    lost: str = ""


@dataclass(frozen=True)
class DeployPlan:
    """All streams, the touched ones first; `heap_mb`: the largest heap of each further process.

    Without `split` the streams beside a touched one start again with it (`spark.split_sessions`).
    """

    streams: tuple[StreamDeploy, ...]
    heap_mb: int
    split: bool = True

    @property
    def touched(self) -> list[StreamDeploy]:
        return [each for each in self.streams if each.action == "deploy"]

    @property
    def rebuilt(self) -> list[StreamDeploy]:
        """The streams that get the code on disk by a recovery, which rebuilds their state."""
        return [each for each in self.streams if each.action == "rebuild"]

    @property
    def due(self) -> list[StreamDeploy]:
        """The streams that get the code on disk by this deploy: now, or at their next start."""
        return [each for each in self.streams if each.action == "deploy" or each.record]

    @property
    def refused(self) -> list[StreamDeploy]:
        """The due streams that would not start, or that a required gate refuses."""
        return [each for each in self.due if each.refused]

    def refusing(self, reasons: Mapping[str, str]) -> DeployPlan:
        """The plan that refuses these streams too, by name with the reason."""
        streams = (
            replace(each, refused=(*each.refused, reasons[each.stream])) if each.stream in reasons else each
            for each in self.streams
        )
        return replace(self, streams=tuple(streams))

    @property
    def further_processes(self) -> int:
        """The number of additional processes: one for each process from which only some of its streams move."""
        return len({each.pid for each in self.touched if each.beside}) if self.split else 0


def make_plan(settings: Settings, topology: Topology, names: Collection[str] = ()) -> DeployPlan:
    seen = {name: look(settings, name) for name in {*topology.streams, *streams_with_status(settings)}}
    plans = [
        _of(settings, topology.streams.get(name), seen[name]) for name in sorted(seen) if not names or name in names
    ]
    plans = [_renamed(settings, topology, each) if each.action == "new" else each for each in plans]
    plans = [each for each in plans if each.action != "removed" or seen[each.stream].session is not None]
    touched = {each.stream for each in plans if each.action == "deploy"}
    plans = [replace(each, beside=_beside(seen, each, touched)) for each in plans]
    plans.sort(key=lambda each: (each.action != "deploy", each.stream))
    return DeployPlan(tuple(plans), settings.spark.driver_memory_mb, settings.spark.split_sessions)


def _of(settings: Settings, stream: Stream | None, seen: HealthFacts) -> StreamDeploy:
    before = seen.status.code_hash if seen.status is not None else ""
    pid = seen.session.pid if seen.session is not None else None
    if stream is None:
        return StreamDeploy(
            seen.stream,
            "removed",
            before,
            pid=pid,
            note="runs, and is no longer declared: it runs on until its session ends, and cannot be started again",
        )
    code = loaded_code(stream, settings.flows)
    after = before if before in code.names else code.hash
    if seen.status is None:
        how = f"its job starts it once Dagster has loaded the code location again, or: {commands.run(stream.name)}"
        return StreamDeploy(stream.name, "new", "", after, note=f"has never run; {how}")
    if seen.plan is not None:
        return StreamDeploy(stream.name, "recovering", before, after, note=f"is being recovered by plan {seen.plan}")
    failed = seen.status.state == "failed"
    if seen.stop is not None or (pid is None and not failed):
        if before == after:
            return StreamDeploy(stream.name, "same", before, after)
        required = settings.for_stream(stream.name).require_deploy
        note = "has the code on disk at its next start" + (", which needs this deploy" if required else "")
        return StreamDeploy(stream.name, "not running", before, after, note=note, record=required)
    if before == after and not seen.status.disk_settings:
        return StreamDeploy(stream.name, "same", before, after, pid=pid)
    return StreamDeploy(
        stream.name,
        "deploy",
        before,
        after,
        changes=tuple(_changes(settings, stream, before, after, settings_too=seen.status.disk_settings)),
        refused=tuple(refusals(settings, stream)),
        pid=pid,
        since=seen.status.disk_code_since,
    )


def _renamed(settings: Settings, topology: Topology, new: StreamDeploy) -> StreamDeploy:
    """The plan of a new stream; names a stream that wrote one of its tables and is no longer declared."""
    tables = set(topology[new.stream].table_names)
    for name in sorted(set(streams_with_status(settings)) - topology.streams.keys()):
        record = stream_record.load(settings, name)
        shared = sorted(tables & {bound.name for bound in record.tables}) if record is not None else []
        if shared:
            note = (
                f"table {shared[0]} belongs to stream {name}, which is no longer declared, so {new.stream} would not "
                f"start. If it was renamed: set name='{name}' in @stream. Otherwise: give {new.stream} another table"
            )
            return replace(new, note=note)
    return new


def _changes(settings: Settings, stream: Stream, before: str, after: str, *, settings_too: bool) -> Iterator[str]:
    """Yields the changes in words; of settings only if the session itself has found other ones on disk.

    The session's own may come from its command line or its environment, which this process does not have.
    """
    noted = declaration.noted(settings, stream.name, before)
    if noted is None:
        yield "the parts of the running code are not known"
        return
    words = declaration.changes(noted, declaration.parts_of(stream, settings))
    words = [each for each in words if settings_too or not each.startswith("setting ")]
    yield from words
    if not words:
        yield "the declaration" if before != after else "settings that this command does not see as the session does"


def refusals(settings: Settings, stream: Stream) -> Iterator[str]:
    """Yields what preflight would refuse, as far as the declaration alone shows it: other tables, other topics."""
    record = stream_record.load(settings, stream.name)
    if record is None or not record.tables:
        return
    snapshot = StreamSnapshot(
        stream.name,
        record,
        CheckpointSnapshot(planned=0),
        tuple(_table(record, stream.name, declared.name, role) for declared, role in all_tables(stream)),
        tuple(TopicSnapshot(topic.name, None) for topic in stream.sources.values()),
    )
    for finding in (*other_tables(snapshot), *other_topics(snapshot)):
        yield f"{finding.found}: {finding.next_step}"


def _table(record: stream_record.StreamRecord, stream: str, name: str, role: Role) -> TableSnapshot:
    bound = record.table(name)
    return TableSnapshot(name, role, bound.table_id if bound is not None else None, stream, None)


def _beside(seen: Mapping[str, HealthFacts], plan: StreamDeploy, touched: Collection[str]) -> tuple[str, ...]:
    """The other streams of its process that are not touched."""
    if plan.action != "deploy" or plan.pid is None:
        return ()
    same = (s.stream for s in seen.values() if s.session is not None and s.session.pid == plan.pid)
    return tuple(sorted(name for name in same if name not in touched))


def tried(
    settings: Settings,
    topology: Topology,
    plan: DeployPlan,
    environment: Mapping[str, str],
    say: Callable[[str], None],
    *,
    required: bool,
) -> DeployPlan:
    """The plan with the class of each change, and with what a trial of its streams would refuse.

    A trial without a verdict refuses all of them if `required`, and otherwise the streams that keep state, which the
    new code may not fit.
    """
    from orchestration.deploys.rebuild import Rebuild, rebuild_of
    from streaming_jobs.runtime import trial

    names = [each.stream for each in plan.due if not each.refused]
    if not names:
        return plan
    verdicts = trial.tried(names, environment)
    if verdicts is not None:
        refused = {name: f"{each.found}: {each.next_step}" for name, each in verdicts.items() if each.found}
        rebuilt = [name for name, each in verdicts.items() if each.change == "state has to be rebuilt"]
        rebuilds = {name: rebuild_of(settings, topology[name]) for name in rebuilt}
        streams = (
            replace(
                each,
                change=verdicts[each.stream].change,
                why=verdicts[each.stream].why,
                columns=verdicts[each.stream].columns,
                rebuild=rebuilds.get(each.stream, Rebuild()).lines,
                rebuildable=each.action == "deploy" and verdicts[each.stream].only_state,
                lost=rebuilds.get(each.stream, Rebuild()).lost,
            )
            if each.stream in verdicts
            else each
            for each in plan.streams
        )
        return replace(plan, streams=tuple(streams)).refusing(refused)
    reason = f"the trial in Spark gave no verdict: run `{commands.doctor()}`, or deploy without it: --no-trial"
    if required:
        return plan.refusing(dict.fromkeys(names, reason))
    records = {name: stream_record.load(settings, name) for name in names}
    keep_state = [name for name, record in records.items() if record is not None and record.state_fingerprint]
    if len(keep_state) < len(names):
        say("the code could not be tried in Spark beforehand; its start shows whether it is refused")
    return plan.refusing(dict.fromkeys(keep_state, f"it keeps state, and {reason}"))
