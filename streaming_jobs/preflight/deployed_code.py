"""The rule of `stream.require_deploy`: a start with other code than before needs the record of a deploy."""

from __future__ import annotations

from collections.abc import Iterator

from streaming_jobs.ledger import CodeVersion
from streaming_jobs.preflight.findings import Finding
from streaming_jobs.preflight.snapshot import StreamSnapshot
from streaming_jobs.state.deploys import Deploy


def not_deployed(snapshot: StreamSnapshot, code: CodeVersion, last: Deploy | None) -> Iterator[Finding]:
    """A finding if `code` has neither run last, nor made the rows of the last recovery, nor was deployed last."""
    ran = snapshot.record.code[-1:] if snapshot.record is not None else ()
    if not ran:
        return
    entries = [each.entry for each in snapshot.tables] + [each.marker for each in snapshot.topic_sinks]
    published = [entry.code for entry in entries if entry is not None and entry.kind == "publish"]
    known = [ran[0].version, *published]
    if any(code.same_code(each) for each in known) or (last is not None and last.after in code.names):
        return
    yield Finding(
        "refuse",
        f"the code of stream {snapshot.stream} on disk ({code.hash}) is not the code that ran last ({ran[0].hash}), "
        "and nobody has deployed it (stream.require_deploy)",
        f"deploy it: recourse deploy {snapshot.stream}; or put the code {ran[0].hash} back on disk",
    )
