"""A fingerprint of all that a permanent failure depends on: job, parameters, settings, code, accepted commits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict

from orchestration.bundle.job import Job
from streaming_jobs.errors import RecourseError
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_record
from streaming_jobs.stream import Stream


def fingerprint(job: Job, streams: Sequence[Stream], settings: Settings, arguments: Sequence[str]) -> str:
    """The fingerprint, 16 hexadecimal digits; secrets are not part of it, so a new password needs a launch by hand.

    `arguments` are those of the session that failed: with other parameters the defaults may still work.
    """
    parts: list[str] = [repr(job), json.dumps(list(arguments)), settings.model_dump_json()]
    for stream in streams:
        code = code_version(stream, settings.flows)
        parts.append(f"{stream.name} {code.hash} {code.package} {_decisions(settings, stream)}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _decisions(settings: Settings, stream: Stream) -> str:
    """The stream's generation, and the foreign commits that a person has accepted (`streams accept`)."""
    try:
        record = stream_record.load(settings, stream.name)
    except RecourseError as error:  # a damaged record is a part of what failed
        return error.found
    if record is None:
        return ""
    return json.dumps([record.generation, [asdict(a) for a in record.accepted]])
