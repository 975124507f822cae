"""Failures by the text of Spark 4.2: tried again, for a person, or refused with what to write instead."""

from __future__ import annotations

import json
from pathlib import Path
from zipfile import ZipFile

import pyspark
import pytest

from streaming_jobs.errors import (
    ConfigurationError,
    Fenced,
    FunctionRaised,
    LeaseBusy,
    OffsetsLost,
    PermanentError,
    RecourseError,
    TransientError,
)
from streaming_jobs.platform import failures
from streaming_jobs.platform.failures import (
    MOST_TRACEBACK,
    classify,
    function_raised,
    larger_than_the_driver_takes,
    remedy,
    with_traceback,
)

LOST = (
    "[KAFKA_DATA_LOSS.COULD_NOT_READ_OFFSET_RANGE] Some data may have been lost: they are not available in Kafka",
    "Partition things-0's offset was changed from 80 to 3",
    "org.apache.spark.SparkException: Job aborted: some data may have been lost",
)
OTHER_STATE = (
    "[STATE_STORE_VALUE_SCHEMA_NOT_COMPATIBLE] Provided value schema does not match existing state value schema",
    "[STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE] Provided key schema does not match",
    "[STREAMING_STATEFUL_OPERATOR_NOT_MATCH_IN_STATE_METADATA] Streaming stateful operator name does not match",
)
PERMANENT = (
    *OTHER_STATE,
    "[CANNOT_LOAD_STATE_STORE] x [CANNOT_READ_STREAMING_STATE_FILE] Error reading streaming state file",
    "[STREAMING_CHECKPOINT_MISSING_METADATA_FILE] Checkpoint location x must have a metadata file",
    "[CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log. Multiple streaming jobs detected for 3",
    "Multiple streaming queries are concurrently using s3a://lake/state/orders/g1/offsets",
    "batch 6 doesn't exist",
    "[PYTHON_VERSION_MISMATCH] Python in worker has different version",
    "TopicAuthorizationException: Not authorized to access topics: [things]",
)
PASSING = (
    "Connection refused",
    "os error 281, which is no full disk",
    "TimeoutException: Timed out waiting for a node assignment",
    "",
)
FULL = (
    "[Errno 28] No space left on device",
    "Generic LocalFileSystem error: Unable to copy data to file /t/x: No space left on device (os error 28)",
    "[CANNOT_WRITE_STATE_STORE.CANNOT_COMMIT] Error writing state store files\nCaused by: No space left on device",
    "java.io.IOException: Disk quota exceeded",
)


class AnalysisException(Exception):
    """Named as PySpark names it."""


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *((text, OffsetsLost) for text in LOST),
        *((text, PermanentError) for text in PERMANENT),
        *((text, TransientError) for text in PASSING),
    ],
)
def test_a_failure_is_lost_records_or_permanent_by_its_text_and_otherwise_tried_again(
    text: str, kind: type[RecourseError]
) -> None:
    cause = RuntimeError(text)
    error = classify(cause)
    assert type(error) is kind
    assert error.__cause__ is cause, "kept for the log"


@pytest.mark.parametrize("text", PERMANENT)
def test_where_spark_refuses_the_state_the_next_step_rebuilds_it_and_otherwise_does_not(text: str) -> None:
    rebuilds = text in OTHER_STATE
    assert ("recover plan STREAM --to-batch -1" in classify(RuntimeError(text)).next_step) is rebuilds
    assert ("a step" in classify(RuntimeError(text), rebuild="a step").next_step) is rebuilds


@pytest.mark.parametrize("text", FULL)
def test_a_full_disk_may_pass_and_is_told_as_what_it_is(text: str) -> None:
    error = classify(OSError(text))
    assert type(error) is TransientError
    assert "no space is left on the device" in error.found and "free space there" in error.next_step


@pytest.mark.parametrize("error", [Fenced("a"), LeaseBusy("b"), OffsetsLost("KAFKA_DATA_LOSS"), RecourseError("c")])
def test_an_error_of_ours_stays_itself(error: RecourseError) -> None:
    assert classify(error) is error


def test_a_rival_driver_on_a_store_is_permanent_in_the_words_of_the_installed_spark() -> None:
    """The file manager of S3 lets the write fail, upon which Spark's log of batches raises this condition."""
    (jar,) = (Path(pyspark.__file__).parent / "jars").glob("spark-common-utils_*.jar")
    with ZipFile(jar) as opened:
        conditions = json.loads(opened.read("error/error-conditions.json"))
    words = "\n".join(conditions["_LEGACY_ERROR_TEMP_2207"]["message"])
    assert isinstance(classify(RuntimeError(words)), PermanentError)


def test_a_python_process_that_was_killed_is_told_as_such() -> None:
    """Spark reads the end of its socket, and an end of file has no message (`StreamingQueryException`)."""
    text = "[STREAM_FAILED] Query [id = 835513ea, runId = 1] terminated with exception: (no cause message)"
    error = classify(RuntimeError(text))
    assert type(error) is TransientError and "killed or out of memory" in error.found and "835513ea" in error.found


def test_a_long_text_is_cut_to_what_a_person_reads() -> None:
    trace = "\n".join(["[SOMETHING] it broke " + "x" * 5000, "second", "third", "at org.apache.spark.Very.deep"])
    text = classify(RuntimeError(trace)).found
    assert text.startswith("RuntimeError: [SOMETHING] it broke")
    assert len(text) < 1100
    assert "org.apache.spark.Very" not in classify(RuntimeError("a\nb\nc\nat org.apache.spark.Very.deep")).found


WORKER = """
  An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/pyspark/worker.py", line 1231, in main
    process()
  File "/home/me/flows.py", line 12, in crooked
    raise Crooked(n)
flows.Crooked: 17 is crooked
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (WORKER, "flows.Crooked: 17 is crooked (/home/me/flows.py:12)"),
        (
            f"Job aborted: Task 0 failed: org.apache.spark.api.python.PythonException: {WORKER}\n\tat org.apache.spark",
            "flows.Crooked: 17 is crooked (/home/me/flows.py:12)",
        ),
        (
            '[DIVIDE_BY_ZERO] Zero. SQLSTATE: 22012\n== DataFrame ==\n"div" was called from\n/my flows/a.py:11\n',
            "[DIVIDE_BY_ZERO] Zero. SQLSTATE: 22012 (/my flows/a.py:11)",
        ),
        (
            "[DIVIDE_BY_ZERO] Zero. SQLSTATE: 22012\n== SQL (line 1, position 1) ==\n1 / (id - id)\n^^^^\n",
            "[DIVIDE_BY_ZERO] Zero. SQLSTATE: 22012 (in the SQL 1 / (id - id))",
        ),
        ("[DIVIDE_BY_ZERO] Zero. SQLSTATE: 22012", "[DIVIDE_BY_ZERO] Zero. SQLSTATE: 22012"),
        (
            WORKER.replace(
                "flows.Crooked", '  File "/venv/lib/python3.11/json/decoder.py", line 355, in decode\nE.C', 1
            ),
            "E.C: 17 is crooked (/home/me/flows.py:12)",
        ),
        (
            WORKER.replace("/home/me/", "/venv/lib/python3.11/site-packages/"),  # installed: no other frame is there
            "flows.Crooked: 17 is crooked (/venv/lib/python3.11/site-packages/flows.py:12)",
        ),
    ],
)
def test_what_the_streams_function_raised_is_told_with_kind_text_place_and_batch(text: str, expected: str) -> None:
    error = classify(RuntimeError(text), where="batch 7: orders")
    assert type(error) is FunctionRaised
    assert error.found == f"the stream's function raised {expected} (batch 7: orders)"
    assert "batch 7" in error.origin and "17" not in error.origin


def test_a_failure_of_recourses_own_code_in_a_worker_is_not_the_functions() -> None:
    """A disk that is gone for two attempts must not stop the stream for good."""
    own = Path(failures.__file__).parents[1] / "sinks" / "delta" / "row_engine.py"
    text = WORKER.replace("/home/me/flows.py", str(own)).replace("flows.Crooked", "PermissionError")
    error = classify(RuntimeError(text), where="batch 7: orders")
    assert type(error) is TransientError and "the stream's function" not in error.found


@pytest.mark.parametrize(
    "kind", ["requests.exceptions.ConnectTimeout", "ConnectionRefusedError", "urllib.error.URLError"]
)
def test_a_function_that_could_not_reach_another_machine_may_pass(kind: str) -> None:
    error = classify(RuntimeError(WORKER.replace("flows.Crooked", kind)), where="batch 7: orders")
    assert type(error) is TransientError and f"the stream's function raised {kind}: 17 is crooked" in error.found


def test_what_the_function_or_its_helper_raises_is_told_with_its_own_line_and_not_that_of_a_library() -> None:
    def helper(text: str) -> object:
        return json.loads(text)

    def function(orders: str) -> object:
        return helper(orders)

    with pytest.raises(ValueError) as raised:
        function("{")
    line = helper.__code__.co_firstlineno + 1
    assert f"({__file__}:{line})" in function_raised(function, raised.value).found

    def function(orders: object) -> object:
        return {}[orders]  # type: ignore[index]

    with pytest.raises(KeyError) as raised:
        function("orders")
    error = function_raised(function, raised.value)
    assert error.found.startswith(f"the stream's function raised KeyError: 'orders' ({__file__}:")


def test_a_plan_that_spark_refuses_is_told_with_the_line_that_made_it() -> None:
    def refused() -> None:
        raise AnalysisException("[UNRESOLVED_COLUMN] no such column")

    with pytest.raises(AnalysisException) as raised:
        refused()
    assert f"no such column ({__file__}:{refused.__code__.co_firstlineno + 1})" in classify(raised.value).found
    called = AnalysisException('[X] no\n== DataFrame ==\n"col" was called from\n/home/me/flows.py:7\n')
    assert type(classify(called)) is ConfigurationError and "(/home/me/flows.py:7)" in classify(called).found


@pytest.mark.parametrize("text", ["An error occurred while calling o87.isActive", "Error while sending or receiving."])
def test_a_jvm_that_does_not_answer_is_told_as_gone(text: str) -> None:
    assert classify(RuntimeError(text)).found == "Spark's JVM is gone"
    real = f"{text}.\n: java.lang.IllegalStateException: stopped"
    assert (
        classify(RuntimeError(real.replace("Error while sending or receiving.", "An error"))).found
        != "Spark's JVM is gone"
    )


TRACEBACK = """[PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR] Failed when Python streaming data source perform it: \
Traceback (most recent call last):
  File "/there/pyspark/sql/streaming/python_streaming_source_runner.py", line 271, in main
  File "/there/streaming_jobs/sources/planner.py", line 122, in _look
    raise OffsetsLost(
streaming_jobs.errors.OffsetsLost: REC-022 things partition 0 is gone
  next: see `recourse streams status`
 SQLSTATE: 38000"""


def test_an_error_of_ours_out_of_spark_keeps_its_class_and_words_and_an_unknown_one_names_its_batch() -> None:
    error = classify(RuntimeError(TRACEBACK))
    assert type(error) is OffsetsLost
    assert (error.found, error.next_step) == ("things partition 0 is gone", "see `recourse streams status`")
    without_step = TRACEBACK.replace("\n  next: see `recourse streams status`", "")
    assert classify(RuntimeError(without_step)).found == "things partition 0 is gone"
    of_others = TRACEBACK.replace("errors.OffsetsLost: REC-022", "errors.ClassVar: REC-022")
    assert type(classify(RuntimeError(of_others))) is TransientError
    assert classify(RuntimeError("it broke"), where="batch 7: orders partition 0 offsets 40 to 49").found == (
        "RuntimeError: it broke (batch 7: orders partition 0 offsets 40 to 49)"
    )


MODE = "[STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION] Invalid streaming output mode:"
REFUSALS = {
    f"{MODE} append. This output mode is not supported for streaming aggregations without watermark on streaming "
    "DataFrames/DataSets. SQLSTATE: 42KDE;": "keys=",
    f"{MODE} update. This output mode is not supported for session window streaming aggregations on streaming "
    "DataFrames/DataSets. SQLSTATE: 42KDE;": "emit='close'",
    "Distinct aggregations are not supported on streaming DataFrames/Datasets. Consider using "
    "approx_count_distinct() instead.;": "dropDuplicates",
    "LeftAnti joins with a streaming DataFrame/Dataset on the right are not supported;": "isNull()",
    "LeftOuter join between two streaming DataFrames/Datasets is not supported in Update output mode, only in Append "
    "output mode;": "emit='close'",
    "Detected pattern of possible 'correctness' issue due to global watermark. The query contains stateful operation "
    'which can emit rows older than the current watermark plus allowed late record delay, which are "late rows" in '
    "downstream stateful operations and these rows can be discarded.;": "emit='close'",
    "[NON_TIME_WINDOW_NOT_SUPPORTED_IN_STREAMING] Window function is not supported in LAG(ID#3L, -1, NULL) (as column "
    "`l`) on streaming DataFrames/Datasets.": "F.window",
    "Stream-stream LeftOuter join between two streaming DataFrame/Datasets is not supported without a watermark in the "
    "join keys, or a watermark on the nullable side and an appropriate range condition;": "INTERVAL",
    "CoGrouping with a streaming DataFrame/Dataset is not supported;": "transformWithState",
    "Multiple applyInPandasWithStates are not supported on a streaming DataFrames/Datasets;": "transformWithState",
    "applyInPandasWithState in update mode is not supported with Append output mode on a streaming "
    "DataFrame/Dataset;": "emit='update'",
    "Sorting is not supported on streaming DataFrames/Datasets, unless it is on aggregated DataFrame/Dataset in "
    "Complete output mode;": "readers of the table",
    "Limits are not supported on streaming DataFrames/Datasets in Update output mode;": "emit='close'",
    "FullOuter joins with streaming DataFrames/Datasets on the left and a static DataFrame/Dataset on the right is not "
    "supported;": "inner join",
}


@pytest.mark.parametrize("text", REFUSALS)
def test_a_refusal_says_what_to_write_instead(text: str) -> None:
    error = classify(AnalysisException(text.replace("streaming aggregations", "streaming \naggregations")))
    assert error.code == "REC-002" and REFUSALS[text] in error.next_step
    assert sum(remedy(text) == remedy(other) for other in REFUSALS) <= 2, "each has its own"


def test_any_other_refusal_asks_for_a_correction() -> None:
    assert remedy("[UNRESOLVED_COLUMN] A column with name `delay` cannot be resolved") == "correct the function"


def test_the_error_of_a_record_has_the_end_of_its_workers_traceback_without_the_frames_of_the_jvm() -> None:
    frames = "".join(f'  File "/project/flows.py", line {line}, in f\n    deeper()\n' for line in range(500))
    text = (
        "Job aborted due to stage failure: Task 0 in stage 5.0 failed 1 times: org.apache.spark.api.python."
        f"PythonException: Traceback (most recent call last):\n{frames}ValueError: no place for 7\n\n"
        "\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:1)\n\nDriver stacktrace:"
    )
    error = classify(RuntimeError(f"Python worker: {text}"))
    assert isinstance(error, FunctionRaised)
    summary, _, trace = with_traceback(error).partition("\n")
    assert summary == "ValueError: no place for 7 (/project/flows.py:499)"
    assert trace.endswith("ValueError: no place for 7") and len(trace) == MOST_TRACEBACK
    assert with_traceback(classify(RuntimeError("[DIVIDE_BY_ZERO] Division by zero. x"))) == (  # type: ignore[arg-type]
        "[DIVIDE_BY_ZERO] Division by zero. x"
    )


def test_an_exception_is_asked_for_its_text_once() -> None:
    class OfSpark(Exception):
        asked = 0

        def __str__(self) -> str:
            self.asked += 1
            return "[DIVIDE_BY_ZERO] Division by zero."

    error = OfSpark()
    raised = classify(error)
    assert isinstance(raised, FunctionRaised) and with_traceback(raised).startswith("[DIVIDE_BY_ZERO]")
    assert not larger_than_the_driver_takes(error) and error.asked == 1
