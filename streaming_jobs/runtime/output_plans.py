"""The output plans of a stream, noted when a session starts: `<state>/<stream>/outputs.json`.

By code version and table: the nodes that the function adds to the source's plan, and the columns that are plain copies
of `_source.partition` and `_source.offset`. The verifier, which runs without Spark, reads from it if every record makes
one row; the Python function does not show that.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from streaming_jobs.runtime.spark_plan import analysed, definitions, parts, streaming_nodes
from streaming_jobs.state.records import json_bytes
from streaming_jobs.storage.object_files import ObjectHandle

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FORMAT = 1
_MOST_CODES = 200
_ATTRIBUTE = re.compile(r"(.+)#(\d+)L?(?:-T\d+ms)?")
_NAMED = re.compile(r".* AS (.+)#(\d+)L?(?:-T\d+ms)?")
_PLACE = re.compile(r"(?:cast\()?_source#\d+\.(partition|offset)(?: as (?:int|bigint)\))?")


def note(handle: ObjectHandle, code: str, outputs: Mapping[str, DataFrame], sources: Iterable[DataFrame]) -> None:
    """Note the plans of a code version, by table, in the stream's file; nothing is written if it has them already."""
    read = [analysed(frame) for frame in sources]
    made = {table: output_of(analysed(frame), read) for table, frame in outputs.items()}
    write(handle, {code: made})


def adopt(handle: ObjectHandle, other: ObjectHandle) -> None:
    """Take over the plans in another file: the replay of a recovery has become the stream."""
    write(handle, _read(other))


def nodes(handle: ObjectHandle, codes: Iterable[str]) -> set[str]:
    """The nodes in the output plans of these versions of the code, as far as a session has noted them."""
    known = _read(handle)
    return {node for code in codes for output in known.get(code, {}).values() for node in output["nodes"]}


def output_of(plan: str, sources: Iterable[str]) -> dict[str, Any]:
    """The entry for a plan (its text): `nodes` besides the sources' nodes, and `position`, two columns or None."""
    nodes = Counter(name for name, _ in streaming_nodes(plan))
    for source in sources:
        nodes -= Counter(name for name, _ in streaming_nodes(source))
    places = _places(plan)
    position = [places["partition"], places["offset"]] if len(places) == 2 else None
    return {"nodes": sorted(nodes), "position": position}


def _places(plan: str) -> dict[str, str]:
    """The output column that is a plain copy of `partition`, and that of `offset`."""
    top = next((line for name, line in streaming_nodes(plan) if name == "Project"), "")
    known = definitions(plan)
    columns: dict[str, str] = {}
    for part in parts(top[top.find("[") + 1 : top.rfind("]")]):
        match = _NAMED.fullmatch(part.strip()) or _ATTRIBUTE.fullmatch(part.strip())
        if match is None:
            continue
        name, column = match[1], match[2]
        for _ in range(len(known) + 1):  # each step follows one column to the one it is made of
            expression = known.get(column, "").rpartition(" AS ")[0]
            if place := _PLACE.fullmatch(expression):
                columns.setdefault(place[1], name)
                break
            step = _ATTRIBUTE.fullmatch(expression)
            if step is None or not re.fullmatch(r"\w+", step[1]):
                break
            column = step[2]
    return columns


def write(handle: ObjectHandle, made: Mapping[str, Any]) -> None:
    """Add the plans of code versions, by version and table, to a stream's file of them."""
    known = _read(handle)
    if all(known.get(code) == output for code, output in made.items()):
        return
    merged = {**{code: output for code, output in known.items() if code not in made}, **made}
    newest = dict(list(merged.items())[-_MOST_CODES:])
    handle.put(json_bytes({"format": _FORMAT, "code": newest}))


def _read(handle: ObjectHandle) -> dict[str, Any]:
    found = handle.read()
    try:
        value = json.loads(found.data if found is not None else "")
    except ValueError:  # each start writes it again
        return {}
    return dict(value.get("code", {})) if value.get("format") == _FORMAT else {}
