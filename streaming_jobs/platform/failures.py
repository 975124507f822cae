"""Classification of failures: an exception that ends a query becomes an error of ours, transient or permanent."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict, TypeVar

from streaming_jobs import errors
from streaming_jobs.errors import (
    ConfigurationError,
    FunctionRaised,
    OffsetsLost,
    PermanentError,
    RecourseError,
    TransientError,
    UsageError,
)
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.processes.failing_row import is_of_a_service, without_row
from streaming_jobs.text import commands

# What to write instead of a plan that Spark refuses for streams: by the text of its refusal, which often has no
# code.
#
# The texts are those of Spark 4.2 (`UnsupportedOperationChecker`).

_FINAL = "write final results: emit='close' on the sink, with event_time and lateness on each source"

_REMEDIES = (
    (r"for session window streaming\s+aggregations", f"{_FINAL}; Spark has no others for sessions"),
    (
        r"mode: append.* for streaming\s+aggregations without watermark",
        (
            "write each change into a table by key: keys= on the DeltaTable (emit='update'); or, for final results, "
            "declare event_time and lateness on the source, and group by a window of that column"
        ),
    ),
    (
        r"LeftAnti joins with a streaming",
        "write a left join, and keep what has no match: .join(other, condition, 'left').where(other.key.isNull())",
    ),
    (r"join between two streaming.*only in Append", f"{_FINAL}; without it a row could be called unmatched too early"),
    (
        r"Stream-stream .*without a watermark in the join keys",
        (
            "declare event_time and lateness on both sources, and bound the times in the condition: "
            "b.at BETWEEN a.at AND a.at + INTERVAL 1 HOUR"
        ),
    ),
    (
        r"possible 'correctness' issue due to global watermark",
        f"{_FINAL}; or split it into two streams with a topic between them",
    ),
    (
        r"Distinct aggregations are not supported",
        (
            "drop duplicates first, then count: .dropDuplicates(['key', 'value']).groupBy('key').count(), with a "
            "window and dropDuplicatesWithinWatermark if the state must not grow; or use approx_count_distinct()"
        ),
    ),
    (
        r"NON_TIME_WINDOW_NOT_SUPPORTED_IN_STREAMING|Window function is not supported",
        (
            "group by a window of the event time (F.window) with max_by, min_by or collect_list; earlier rows of a "
            "key, as for lag, are state of a processor: groupBy(key).transformWithState(...)"
        ),
    ),
    (r"Sorting is not supported", "leave the sorting to the readers of the table: a stream's rows have no last one"),
    (r"Limits are not supported .*Update", "write emit='close' on the sink, or leave out the limit"),
    (
        r"InPandasWithState in (?:append|update) mode is not supported with",
        "declare one mode in both places: 'append' with emit='close' on the sink, or 'update' with emit='update'",
    ),
    (
        r"Multiple applyInPandasWithStates|CoGrouping with a streaming",
        (
            "use transformWithState, of which a stream may have several; for two inputs, on a union of them with the "
            "same columns"
        ),
    ),
    (
        r"(?:FullOuter|RightOuter|LeftOuter) joins? with (?:a )?streaming .* static",
        "keep only the rows of the stream: an inner join, or a left join with the stream on the left",
    ),
)


def remedy(text: str) -> str:
    """The next step for a plan that Spark refuses with this text."""
    return next((words for found, words in _REMEDIES if re.search(found, text, re.DOTALL)), "correct the function")


_E = TypeVar("_E", bound=RecourseError)
_LOST = re.compile(
    r"KAFKA_DATA_LOSS|data may have been lost|Some data may have been lost|offset was changed from", re.I
)
_OTHER_STATE = re.compile(
    r"STATE_STORE_(VALUE|KEY)_SCHEMA_NOT_COMPATIBLE|STREAMING_STATEFUL_OPERATOR_NOT_MATCH"
    r"|STATE_STORE_INVALID_(VARIABLE_TYPE_CHANGE|VALUE_SCHEMA_EVOLUTION)|STATE_STORE_COLUMN_FAMILY_SCHEMA_INCOMPATIBLE"
)
"""Spark's classes of errors about state that a plan of another form has written."""
_PERMANENT = re.compile(
    rf"{_OTHER_STATE.pattern}|CANNOT_READ_STREAMING_STATE"
    r"|STREAMING_CHECKPOINT_MISSING_METADATA_FILE|CONCURRENT_STREAM_LOG_UPDATE|batch -?\d+ doesn't exist"
    r"|Multiple streaming queries are concurrently using"
    r"|Python worker.*different version|PYTHON_VERSION_MISMATCH|TOPIC_AUTHORIZATION_FAILED|TopicAuthorization"
)
_FULL = re.compile(
    r"No space left on device|os error 28\b|\[Errno 28\]|Disk quota exceeded|os error 122\b|\[Errno 122\]"
)
_DENIED = re.compile(r"lacked the necessary privileges|HTTP error status \(40[13]|40[13] (?:Forbidden|Unauthorized)")
_STORE = re.compile(r"Generic (?:S3|GCS|MicrosoftAzure) error")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""Escape sequences of terminals, with which deltalake sets off the causes of an error."""
_GONE = re.compile(
    r"^An error occurred while calling \S+$|Error while sending or receiving|Answer from Java side is empty"
)
_WORKER = re.compile(
    r"Python worker(?s:.)*Traceback \(most recent call last\)|PythonException(?s:.)*Traceback \(most recent"
)
_OURS = re.compile(
    r"^streaming_jobs\.errors\.(?P<kind>\w+): REC-\d{3} (?P<found>.*?)$(?:\n  next: (?P<next>.*?)$)?", re.MULTILINE
)
_PLACE = re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+)')
_CALLED_FROM = re.compile(r'^== DataFrame ==\n"[^"\n]*" was called from\n(?P<place>\S.*:\d+)$', re.MULTILINE)
_SQL = re.compile(r"^== SQL.*==\n(?P<text>.+)$", re.MULTILINE)
"""Spark's query context: the call, or the SQL, whose rows failed."""
_OWN = f"{Path(__file__).parents[1]}/"
_LIBRARIES = re.compile(r"/pyspark/|/py4j/|pyspark\.zip|/(?:site|dist)-packages/|/lib/python3\.\d+/|^<")
_ON_DATA = re.compile(
    r"\[(USER_RAISED_EXCEPTION|DIVIDE_BY_ZERO|REMAINDER_BY_ZERO|CAST_INVALID_INPUT|CAST_OVERFLOW|ARITHMETIC_OVERFLOW"
    r"|BINARY_ARITHMETIC_OVERFLOW|NUMERIC_VALUE_OUT_OF_RANGE|INVALID_ARRAY_INDEX|MAP_KEY_DOES_NOT_EXIST|DUPLICATED_MAP_KEY"
    r"|CANNOT_PARSE_TIMESTAMP|DATETIME_OVERFLOW|INVALID_INDEX_OF_ZERO|INVALID_PARAMETER_VALUE|NULL_MAP_KEY)\b"
)
_NO_CAUSE = "(no cause message)"
"""Spark's words for the end of file that it reads from a Python process of a source that is gone."""
_TEXT = "_recourse_text"
"""The attribute of an exception that keeps its text."""
_JVM_FRAMES = re.compile(r"\n\s*at [\w.$]+\(|\n\s*(?:JVM|Driver) stacktrace")
MOST_TRACEBACK = 3_000
"""Characters of a traceback that are kept with a record: its end, where the function's own lines are."""
_FIRST_LINES = 3
_NAMED = 4


class ErrorReport(TypedDict, total=False):
    """An error in a status file: its code, the fact, the next step, and its consequences.

    `permanent`: a person has to act; `lasting`: the quick retries are used up; `at`: the time of the error, ISO.
    """

    code: str
    found: str
    next: str
    permanent: bool
    lasting: bool
    at: str


def larger_than_the_driver_takes(error: BaseException) -> bool:
    """True if Spark refused to send rows to the driver, because of the session's bound on the size of results."""
    return "spark.driver.maxResultSize" in text_of(error)


def text_of(error: BaseException) -> str:
    """What `str` gives, once for an exception: one of Spark's asks the JVM in 34 calls each time."""
    known = vars(error)
    if _TEXT not in known:
        known[_TEXT] = str(error)
    return str(known[_TEXT])


def classify(error: BaseException, where: str = "", rebuild: str = "") -> RecourseError:
    """The error as one of ours: unchanged if it is one, else permanent or transient by Spark's text.

    An exception of the stream's own function mostly repeats with the same records, but the function may also call a
    service that fails: it is tried again, and is permanent if it repeats (`Retries`). An unknown failure is transient.
    `where` names the batch and its offsets, `rebuild` the step that rebuilds the stream's state.
    """
    if isinstance(error, RecourseError):
        return error
    raw = text_of(error)
    if (ours := _from_a_worker(raw)) is not None:
        return _caused(ours, error)
    kind, text = type(error).__name__, _COLOURS.sub("", raw)
    summary = " ".join(text.split("\n")[:_FIRST_LINES]).strip()[:1000]
    summary += f" ({where})" if where else ""
    if _FULL.search(text):
        full = f"no space is left on the device of the tables, of the state, or of Spark's scratch folder: {summary}"
        return _caused(
            TransientError(full, "free space there (`df -h`); nothing is lost, a later attempt continues"), error
        )
    if (of_store := _of_a_store(text)) is not None:
        return _caused(of_store, error)
    if _LOST.search(text):
        return _caused(
            OffsetsLost(f"records the stream still needs are gone: {summary}", f"see `{commands.status()}`"), error
        )
    if kind in ("AnalysisException", "ParseException"):
        place = _context(text) or _in_users_code(
            [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
        )
        return _caused(ConfigurationError(f"Spark refuses the stream's plan: {summary}{place}", remedy(text)), error)
    if _PERMANENT.search(text):
        rebuilds = f"take the change back, or rebuild the state: {rebuild or commands.plan('STREAM', to_batch=-1)}"
        step = rebuilds if _OTHER_STATE.search(text) else "see docs/operate.md, 'A stream that will not start'"
        return _caused(PermanentError(summary, step), error)
    if _GONE.search(text):
        return _caused(TransientError("Spark's JVM is gone", "the session's log says how it ended"), error)
    if (raised := _raised(text)) is not None:
        summary, origin = raised
        words = f"the stream's function raised {summary}{f' ({where})' if where else ''}"
        if is_of_a_service(origin.partition(" ")[0]):
            return _caused(TransientError(words, "check the service that the function calls"), error)
        return _caused(FunctionRaised(words, "correct the function if the error repeats", f"{origin} {where}"), error)
    if _NO_CAUSE in text:
        summary = f"a process of the stream has ended, killed or out of memory ({summary})"
        return _caused(TransientError(summary, "watch the memory if it repeats; nothing is lost"), error)
    return _caused(TransientError(f"{kind}: {summary}", "its session's log has the whole trace"), error)


def _of_a_store(text: str) -> TransientError | None:
    """The error of an object store in deltalake's text; None if there is none."""
    shown = " ".join(text.split())[:500]
    if _DENIED.search(text):
        check = "check the credentials and their rights on the bucket: list, read, write, delete"
        return TransientError(f"the object store refuses access: {shown}", check)
    if _STORE.search(text):
        check = "check its address, and that it runs; nothing is lost, a later attempt continues"
        return TransientError(f"the object store did not answer: {shown}", check)
    return None


def with_traceback(error: FunctionRaised) -> str:
    """What the function raised, and the traceback of its Python worker if it has one, cut at its beginning."""
    text = "" if error.__cause__ is None else _COLOURS.sub("", text_of(error.__cause__))
    summary, _ = _raised(text) or (error.found, "")
    if not _WORKER.search(text):
        return summary
    frames = without_row(_JVM_FRAMES.split(text[text.rindex("Traceback (most recent call last)") :])[0]).strip()
    return f"{summary}\n{frames[-MOST_TRACEBACK:]}"


def function_raised(function: Callable[..., object], error: Exception) -> TransientError:
    """The error for an exception that a stream's function raised when it was called with frames."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename == function.__code__.co_filename]  # also where it is installed
    places = [(f.filename, f.lineno) for f in frames]
    place = _in_users_code(places) or "".join(f" ({f.filename}:{f.lineno})" for f in (own or frames)[-1:])
    words = f"the stream's function raised {type(error).__name__}: {error}{place}"
    origin = f"{type(error).__name__}{place}"
    if is_of_a_service(type(error).__name__):
        return _caused(TransientError(words, "check the service that the function calls"), error)
    return _caused(FunctionRaised(words, "correct the function if the error repeats", origin), error)


def _from_a_worker(text: str) -> RecourseError | None:
    """The error that Recourse raised in a Python process of Spark, rebuilt from its traceback."""
    match = _OURS.search(text)
    kind = getattr(errors, match["kind"], None) if match else None
    if match is None or not (isinstance(kind, type) and issubclass(kind, RecourseError)):
        return None
    return kind(match["found"].strip(), (match["next"] or "").strip())


def _raised(text: str) -> tuple[str, str] | None:
    """Text and origin of an exception of the stream's code, in a Python worker or in SQL on its records.

    None for any other failure, such as one of Recourse's own code in a worker: a file that cannot be written.
    """
    if _WORKER.search(text):
        lines = text[text.rindex("Traceback (most recent call last)") :].split("\n")[1:]
        last = next((line for line in lines if line and not line.startswith(" ")), "an exception")
        frames = [(m["file"], m["line"]) for line in lines if (m := _PLACE.match(line))]
        places = [(file, line) for file, line in frames if "/pyspark/" not in file]
        if not _in_users_code(places) and _raised_by_own(frames):
            return None
        place = _in_users_code(places) or "".join(f" ({file}:{line})" for file, line in places[-1:])
        return f"{last.strip()[:500]}{place}", f"{last.partition(':')[0]}{place}"
    if (match := _ON_DATA.search(text)) is not None:
        place = _context(text[match.start() :])
        return text[match.start() :].partition("\n")[0].strip()[:500] + place, f"{match[1]}{place}"
    return None


def _raised_by_own(frames: Sequence[tuple[str, object]]) -> bool:
    """True if Recourse's own code has raised, or a library that it called.

    Not where PySpark, called by it, could not call the stream's code: rows of processors go through own code.
    """
    callers = [file for file, _ in frames if file.startswith(_OWN) or "/pyspark/" in file]
    return bool(callers) and callers[-1].startswith(_OWN)


def _context(text: str) -> str:
    """The place of the call that Spark's text names, or the SQL; empty if it names none."""
    if (called := _CALLED_FROM.search(text)) is not None:
        return f" ({called['place']})"
    return f" (in the SQL {sql['text'].strip()[:200]})" if (sql := _SQL.search(text)) is not None else ""


def _in_users_code(places: Sequence[tuple[str, object]]) -> str:
    """The innermost of these files and lines that is of no library and not of Recourse; empty if there is none."""
    examples = f"{_OWN}examples/"
    users = [
        (file, line)
        for file, line in places
        if file.startswith(examples) or not (file.startswith(_OWN) or _LIBRARIES.search(file))
    ]
    return f" ({users[-1][0]}:{users[-1][1]})" if users else ""


def _caused(error: _E, by: BaseException) -> _E:
    error.__cause__ = by
    return error


def named(entry: LedgerEntry | None) -> str:
    """An unfinished batch and its offsets in words; empty for None."""
    if entry is None:
        return ""
    parts = [
        f"{r.topic} partition {p} offsets {r.start.get(p, 0)} to {end - 1}"
        for r in entry.offsets
        for p, end in r.end.items()
        if end > r.start.get(p, 0)
    ]
    more = f" and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
    return f"batch {entry.batch}: {', '.join(parts[:_NAMED]) or 'no records'}{more}"


def report_of(error: RecourseError) -> ErrorReport:
    return {
        "code": error.code,
        "found": error.found,
        "next": error.next_step,
        "permanent": isinstance(error, (PermanentError, UsageError)),
    }
