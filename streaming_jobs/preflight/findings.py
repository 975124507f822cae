"""What preflight finds, and the error that it becomes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from streaming_jobs.errors import OffsetsLost, PreflightRefused, RecourseError, TableAwaited, TopicUnknown
from streaming_jobs.ledger.entry import CodeVersion
from streaming_jobs.preflight.snapshot import StreamSnapshot
from streaming_jobs.state.stream_history import Deploy
from streaming_jobs.text import commands


@dataclass(frozen=True)
class StartFinding:
    """One problem that preflight has found, and the next step.

    | severity | the start | the error |
    |---|---|---|
    | `refuse` | is refused until a person has acted | `PreflightRefused` |
    | `lost` | the same: records or versions are gone | `OffsetsLost` |
    | `await` | is tried again: a table does not exist yet | `TableAwaited` |
    | `unknown` | is tried again: the broker does not know a topic at present | `TopicUnknown` |
    | `warn` | goes ahead, with a warning in the status | |

    Severities that may pass count only if all blocking findings may pass.
    """

    severity: Literal["refuse", "lost", "await", "unknown", "warn"]
    found: str
    next_step: str


def enforce(findings: list[StartFinding]) -> list[str]:
    """Raise the error for findings that forbid a start; return the warnings."""
    blocking = [f for f in findings if f.severity != "warn"]
    if blocking:
        steps = list(dict.fromkeys(f.next_step for f in blocking))
        raise _kind({f.severity for f in blocking})("; ".join(f.found for f in blocking), "; or ".join(steps))
    return [f"{f.found}: {f.next_step}" for f in findings]


def _kind(severities: set[str]) -> type[RecourseError]:
    if severities == {"lost"}:
        return OffsetsLost
    if severities <= {"await", "unknown"}:
        return TopicUnknown if "unknown" in severities else TableAwaited
    return PreflightRefused


# The rule of `stream.require_deploy`: a start with other code than before needs the record of a deploy.


def not_deployed(snapshot: StreamSnapshot, code: CodeVersion, last: Deploy | None) -> Iterator[StartFinding]:
    """A finding if `code` has neither run last, nor made the rows of the last recovery, nor was deployed last."""
    ran = snapshot.record.code[-1:] if snapshot.record is not None else ()
    if not ran:
        return
    entries = [each.entry for each in snapshot.tables] + [each.marker for each in snapshot.topic_sinks]
    published = [entry.code for entry in entries if entry is not None and entry.kind == "publish"]
    known = [ran[0].version, *published]
    if any(code.same_code(each) for each in known) or (last is not None and last.after in code.names):
        return
    yield StartFinding(
        "refuse",
        f"the code of stream {snapshot.stream} on disk ({code.hash}) is not the code that ran last ({ran[0].hash}), "
        "and nobody has deployed it (stream.require_deploy)",
        f"deploy it: {commands.deploy(snapshot.stream)}; or put the code {ran[0].hash} back on disk",
    )
