"""Which failures may pass and which need a person: every exception a query can end with becomes one of ours."""

from __future__ import annotations

import re

from streaming_jobs.errors import ConfigurationError, OffsetsLost, PermanentError, RecourseError, TransientError

_LOST = re.compile(
    r"KAFKA_DATA_LOSS|data may have been lost|Some data may have been lost|offset was changed from", re.I
)
_PERMANENT = re.compile(
    r"STATE_STORE_(VALUE|KEY)_SCHEMA_NOT_COMPATIBLE|STREAMING_STATEFUL_OPERATOR_NOT_MATCH|CANNOT_READ_STREAMING_STATE"
    r"|STREAMING_CHECKPOINT_MISSING_METADATA_FILE|CONCURRENT_STREAM_LOG_UPDATE|batch -?\d+ doesn't exist"
    r"|Python worker.*different version|PYTHON_VERSION_MISMATCH|TOPIC_AUTHORIZATION_FAILED|TopicAuthorization"
)
_FULL = re.compile(
    r"No space left on device|os error 28\b|\[Errno 28\]|Disk quota exceeded|os error 122\b|\[Errno 122\]"
)
_FIRST_LINES = 3


def classify(error: BaseException) -> RecourseError:
    """The error as one of ours: itself if it is, else permanent or transient by what Spark says.

    An error in the stream's own function comes back with every retry on the same records, but so would a full
    disk; unknown failures are therefore transient, and the session stops trying after `max_restarts`.
    """
    if isinstance(error, RecourseError):
        return error
    kind, text = type(error).__name__, str(error)
    said = " ".join(text.split("\n")[:_FIRST_LINES]).strip()[:1000]
    if _FULL.search(text):
        full = f"no space is left on the device of the tables, of the state, or of Spark's scratch folder: {said}"
        return _caused(TransientError(full, "free space there (`df -h`); nothing is lost, a later try goes on"), error)
    if _LOST.search(text):
        return _caused(
            OffsetsLost(f"records the stream still needs are gone: {said}", "see `recourse streams status`"), error
        )
    if kind in ("AnalysisException", "ParseException"):
        return _caused(ConfigurationError(f"Spark refuses the stream's plan: {said}", "correct the function"), error)
    if _PERMANENT.search(text):
        return _caused(PermanentError(said, "see docs/operate.md, 'A stream that will not start'"), error)
    return _caused(TransientError(f"{kind}: {said}", "the session tries again; its log has the whole trace"), error)


def _caused(error: RecourseError, by: BaseException) -> RecourseError:
    error.__cause__ = by
    return error
