"""A plan that Spark refuses for streams is refused with what to write instead; the texts are those of Spark 4.2."""

from __future__ import annotations

import pytest

from streaming_jobs.platform.failures import classify, remedy

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


class AnalysisException(Exception):
    """Named as PySpark names it."""


@pytest.mark.parametrize("text", REFUSALS)
def test_a_refusal_says_what_to_write_instead(text: str) -> None:
    error = classify(AnalysisException(text.replace("streaming aggregations", "streaming \naggregations")))
    assert error.code == "REC-002" and REFUSALS[text] in error.next_step
    assert sum(remedy(text) == remedy(other) for other in REFUSALS) <= 2, "each has its own"


def test_any_other_refusal_asks_for_a_correction() -> None:
    assert remedy("[UNRESOLVED_COLUMN] A column with name `delay` cannot be resolved") == "correct the function"
