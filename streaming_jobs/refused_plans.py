"""What to write instead of a plan that Spark refuses for streams: by the text of its refusal, which often has no code.

The texts are those of Spark 4.2 (`UnsupportedOperationChecker`).
"""

from __future__ import annotations

import re

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
