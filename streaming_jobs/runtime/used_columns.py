"""The columns of a source that a stream uses, read from its optimised plan, so that the source builds no others.

In the plan, Spark has put a projection of what is used directly above the source:

    Project [_record#6.id AS id#11L, offset#2L AS o#19L]
    +- Filter (NOT _bad#7 AND NOT (_record#6.kind = test))
       +- CollectMetrics recourse_payments, [count(if (NOT _bad#7) null else _bad#7) AS bad#8L], 0
          +- Project [offset#2L, _record#6, _bad#7]
             +- StreamingRelationV2 ..., kafka_clean_payments, ..., [topic#0, partition#1, offset#2L, ...]

A column that is left out by mistake would be null without a word. So whatever does not look like this counts as used:
without that projection all columns are, and a record that is passed on whole uses all of its fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from streaming_jobs.runtime.query_plan import all_fields_shown
from streaming_jobs.sources.record_blocks import RECORD

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_OUTPUT = re.compile(r"\[([^\[\]]*)\], name=")
_ATTRIBUTE = re.compile(r"(\w+)#(\d+)L?")


def used_columns(frame: DataFrame, source: str, fields: Sequence[str]) -> frozenset[str] | None:
    """The columns of the data source named `source` that a frame uses, those of the record as `_record.field`.

    `fields` are the record's. None: all columns.
    """
    with all_fields_shown(frame.sparkSession):
        plan = frame._jdf.queryExecution()
        optimised = plan.sparkSession().sessionState().optimizer().execute(plan.analyzed())
        return used_in(str(optimised.toString()), source, fields)


def used_in(plan: str, source: str, fields: Sequence[str]) -> frozenset[str] | None:
    """The same for a plan given as text."""
    lines = plan.splitlines()
    (at, *further) = [i for i, line in enumerate(lines) if f", {source}, " in line] or [0]
    output = _OUTPUT.search(lines[at])
    if further or at == 0 or output is None:
        return None
    ids = {number: name for name, number in _ATTRIBUTE.findall(output[1])}
    passed = _projected(lines[at - 1], ids)
    used = passed or set(ids.values())
    number = next((number for number, name in ids.items() if name == RECORD), "")
    elsewhere = "\n".join(line for i, line in enumerate(lines) if i != at and not (passed and i == at - 1))
    uses = re.findall(rf"(?<![\w`]){RECORD}#{number}(?!\d)(.?)", elsewhere)
    if any(after != "." for after in uses):
        return frozenset(used | {f"{RECORD}.{name}" for name in fields})
    return frozenset(used | {f"{RECORD}.{n}" for n in fields if f"{RECORD}#{number}.{n}" in elsewhere})


def _projected(line: str, ids: Mapping[str, str]) -> set[str]:
    """The columns that a projection passes on, if it does nothing else; otherwise none."""
    projection = re.fullmatch(r"[\s:|~+-]*Project \[(.*)\]", line)
    members = projection[1].split(",") if projection else []
    passed = [_ATTRIBUTE.fullmatch(member.strip()) for member in members]
    return {ids[m[2]] for m in passed if m} if all(m is not None and m[2] in ids for m in passed) else set()
