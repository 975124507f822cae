"""What happened to a stream besides its batches: deploys, changes of code, sessions, recoveries, savepoints.

Each comes from the files that have it: `deploys.jsonl`, the stream's record, `sessions.jsonl`, the plans with their
journals, and the savepoints. A file that cannot be read becomes a mark that says so, or is left out where a start of
the stream reports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reprocessing.plan import plan_file
from reprocessing.plan.journal import NOT_CONFIRMED, Line, journal_of
from reprocessing.plan.plan import RecoveryPlan
from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.platform import json_lines
from streaming_jobs.settings import Settings
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.status import read_status
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_history import SessionEvent, session_events
from streaming_jobs.text.spelling import counted, instant_words

MarkKind = Literal["deploy", "code", "session", "recovery", "savepoint", "slice"]
KINDS: tuple[MarkKind, ...] = ("deploy", "code", "session", "recovery", "savepoint", "slice")

_HASH = 8


@dataclass(frozen=True)
class Mark:
    """One event at `at` (seconds since 1970): its kind, what it was in a word, and a line of text about it."""

    at: float
    kind: MarkKind
    what: str
    text: str
    plan: str | None = None


def marks_of(settings: Settings, stream: str) -> list[Mark]:
    every = [*events_of(settings, stream), *_savepoints(settings, stream)]
    return sorted(every, key=lambda mark: mark.at)


def events_of(settings: Settings, stream: str) -> list[Mark]:
    """All marks but savepoints, which may be hundreds of files; oldest first."""
    deployed = list(_deploys(settings, stream))
    found = [
        *deployed,
        *_code_changes(settings, stream, deployed),
        *sessions(settings, stream),
        *_recoveries(settings, stream),
    ]
    return sorted(found, key=lambda mark: mark.at)


def _deploys(settings: Settings, stream: str) -> Iterator[Mark]:
    for value in json_lines.read(StreamFolder.of(settings, stream).deploys):
        try:
            at, to, before = float(value["at"]), _version(value["to"]), _version(value.get("from"))
        except (ValueError, KeyError, TypeError, AttributeError):  # written by hand
            continue
        by = value.get("by")
        change = f"{_short(before)} -> {_short(to)}" if before else _short(to)
        yield Mark(at, "deploy", to, f"deploy {change}{f' by {by}' if by else ''}")


def _version(value: Any) -> str:
    """A version of the code as text: it may be that, a pair of hash and package, or an object with both."""
    if isinstance(value, dict):
        value = value["hash"]
    return str(value[0] if isinstance(value, list) else value or "")


def _same(deployed: str, hash_: str) -> bool:
    """True if a deploy was of that version of the code; either may be shortened."""
    return bool(deployed) and (hash_.startswith(deployed) or deployed.startswith(hash_))


def _code_changes(settings: Settings, stream: str, deployed: Sequence[Mark]) -> Iterator[Mark]:
    """Versions of the code that began without a deploy command."""
    try:
        record = stream_record.load(settings, stream)
    except PreflightRefused:  # its next start reports it
        return
    before: str | None = None
    for code in record.code if record is not None else ():
        last = next((mark for mark in reversed(deployed) if mark.at <= code.at), None)
        if last is None or not _same(last.what.split(" ")[0], code.hash):
            change = f"{_short(before)} -> {_short(code.hash)}" if before else f"{_short(code.hash)}, the first"
            words = f"code {change}, from g{code.generation:04d} batch {max(code.batch, 0)} on"
            yield Mark(code.at, "code", code.hash, f"{words}; no deploy command" if before else words)
        before = code.hash


def sessions(settings: Settings, stream: str) -> Iterator[Mark]:
    """Yields starts, ends and slices; from before there was a file of them, the newest start alone."""
    events = session_events(settings, stream)
    status = read_status(settings, stream)
    if not events and status is not None and status.started_at:
        yield Mark(status.started_at, "session", "started", f"session started, process {status.pid}")
    earlier: SessionEvent | None = None
    for event in events:
        if event.what == "slice":
            yield Mark(event.at, "slice", "rebuilt", event.reason)
        else:
            yield Mark(event.at, "session", event.what, _session_words(event, earlier))
            earlier = event


def _session_words(event: SessionEvent, earlier: SessionEvent | None) -> str:
    reason = f": {event.reason}" if event.reason else ""
    if event.what == "restarted":
        return f"restarted after an error{reason}"
    if event.what == "failed":
        return f"failed{reason}"
    if event.what == "stopped":
        return "stopped"
    killed = earlier is not None and earlier.what in ("started", "restarted")
    lost = f"; process {earlier.pid}, before it, ended without a word" if earlier is not None and killed else ""
    return f"session started, process {event.pid}{lost}"


def _recoveries(settings: Settings, stream: str) -> Iterator[Mark]:
    for name in plan_file.names_of(settings, stream):
        place = plan_file.folder(settings, name)
        try:
            plan = plan_file.load(settings, name)
        except UsageError as error:
            at = (place / "plan.json").stat().st_mtime
            yield Mark(at, "recovery", "unreadable", f"recovery {name}: {error.found}", name)
            continue
        doing = f"takes back {plan.undoes}" if plan.undoes else plan.of(stream).target_words
        yield Mark(plan.made_at, "recovery", "planned", f"recovery {name} planned: {doing}", name)
        yield from _steps(plan, stream, journal_of(settings, name).lines())


def _steps(plan: RecoveryPlan, stream: str, lines: Sequence[Line]) -> Iterator[Mark]:
    name = plan.id

    def mark(line: Line, what: str, words: str) -> Mark:
        return Mark(line.at, "recovery", what, f"recovery {name} {words}", name)

    if lines and not lines[0].is_of("abort"):
        yield mark(lines[0], "begun", "begun: the stream stops")
    for line in lines:
        if line.stream not in (None, stream):
            continue
        if line.state == "failed":
            error = str(line.found.get("error", ""))
            if NOT_CONFIRMED in error:
                yield mark(line, "waiting", "waits for confirmation")
            else:
                yield mark(line, "failed", f"failed at {line.stage}: {error[:200]}")
        elif line.state == "done" and line.is_of("publish"):
            how = f"took back {plan.undoes}" if plan.undoes else "published"
            yield mark(line, "undone" if plan.undoes else "published", f"{how}{_replayed(plan, stream)}")
        elif line.state == "done" and line.is_of("skip"):
            yield mark(line, "skipped", "moved the stream forward without a replay")
        elif line.state == "done" and line.is_of("clean_up"):
            yield mark(line, "finished", "finished: the stream may run")
        elif line.state == "done" and line.is_of("abort"):
            yield mark(line, "aborted", "given up")


def _replayed(plan: RecoveryPlan, stream: str) -> str:
    of_stream = plan.of(stream)
    return f": {counted(of_stream.records, 'record')} planned to be replayed, as generation {of_stream.generation}"


def _savepoints(settings: Settings, stream: str) -> Iterator[Mark]:
    for each in savepoints.savepoints(settings, stream):
        note = f": {each.note}" if each.note else ""
        yield Mark(each.taken_at, "savepoint", each.reason, f"savepoint {each.id} ({each.reason}){note}")


def _short(code: str) -> str:
    """A version of the code as it is shown: of its hash the first characters."""
    return code.split(" ", maxsplit=1)[0][:_HASH]


def as_json(mark: Mark) -> dict[str, Any]:
    value = {"kind": mark.kind, "at": mark.at, "time": instant_words(mark.at), "what": mark.what, "text": mark.text}
    return {**value, **({"plan": mark.plan} if mark.plan else {})}
