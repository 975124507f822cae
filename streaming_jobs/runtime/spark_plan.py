"""What the processors of `transformWithState` declare: their name and their state, which Spark's plan does not show.

The plan holds each processor as pickled bytes. A copy is made of them, and its `init` is called with a handle that only
notes what is declared; Spark itself calls `init` once before the first batch, too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor
    from pyspark.sql.types import StructType


log = structlog.get_logger()

NODE = "TransformWithStateInPySpark"


class DeclaredState:
    """A handle for `init` of a processor: notes the declared state variables, and holds no state."""

    def __init__(self) -> None:
        self.variables: list[str] = []

    def getValueState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> None:  # noqa: N802, N803
        self._note("value", stateName, _type(schema), ttlDurationMs)

    def getListState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> None:  # noqa: N802, N803
        self._note("list", stateName, _type(schema), ttlDurationMs)

    def getMapState(  # noqa: N802
        self,
        stateName: str,  # noqa: N803
        userKeySchema: StructType | str,  # noqa: N803
        valueSchema: StructType | str,  # noqa: N803
        ttlDurationMs: int | None = None,  # noqa: N803
    ) -> None:
        self._note("map", stateName, f"{_type(userKeySchema)} -> {_type(valueSchema)}", ttlDurationMs)

    def deleteIfExists(self, stateName: str) -> None:  # noqa: N802, N803
        """A variable that is purged is declared no more."""

    def _note(self, kind: str, name: str, of: str, ttl: int | None) -> None:
        self.variables.append(f"{kind} {name}: {of}{' with a time to live' if ttl else ''}")


def declared_processors(plan: Any) -> list[str]:
    """The processors in an analysed plan (of the JVM), in the order of its text."""
    return [_words_of(node) for node in _nodes(plan) if node.nodeName() == NODE]


def words(processor: StatefulProcessor) -> str:
    """A processor's name and its state variables, sorted by name; the length of a time to live is left out."""
    name, state = type(processor).__qualname__.rpartition(".")[2], DeclaredState()
    try:
        processor.init(state)  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001 - Spark calls it too, and then the stream fails with its trace
        log.warning("the state of a processor is not known: its init failed", processor=name, reason=repr(error))
    return "; ".join([f"processor {name}", *sorted(state.variables)])


def _words_of(node: Any) -> str:
    from pyspark.serializers import CloudPickleSerializer

    command = node.functionExpr().func().command().mkString(",")
    try:
        udf, _ = CloudPickleSerializer().loads(  # type: ignore[no-untyped-call]
            bytes(int(each) & 0xFF for each in command.split(","))
        )
        return words(udf.__self__._stateful_processor)
    except Exception as error:  # noqa: BLE001 - a module that is missing here, or one of more than 1 MB, is in no error
        log.warning("a processor is not known: its copy cannot be read", reason=repr(error))
        return "processor"


def _nodes(plan: Any) -> Iterator[Any]:
    yield plan
    children = plan.children()
    for index in range(children.size()):
        yield from _nodes(children.apply(index))


def _type(schema: StructType | str) -> str:
    from pyspark.sql.types import DataType

    return (DataType.fromDDL(schema) if isinstance(schema, str) else schema).simpleString()


# Traits of a stream's analysed plan, read before it runs: if it keeps state, multiplies rows, has unknown
# operators.
#
# Works on the text of Spark's analysed plan (`QueryExecution.analyzed`), one node per line, `~` before streaming
# nodes. An operator that is in none of the lists here may keep state and may multiply rows: its batches take the
# executors, where neither does harm, unless the setting `path` is driver.
#
# The state fingerprint is that text for every stateful node, with the expressions of the columns it groups by (only
# they have the length of a window), without generated ids and without the watermark delay. It changes when an
# aggregation, a grouping or a window changes; existing state would then be silently wrong. Filters and other
# columns may change. For a function of the user's with state it has the keys, the declared state and the modes, and
# a processor's name. The columns that the function gets are left out; fingerprints of the first scheme had them, so
# that text is kept beside (`0 formerly`), and `comparable` compares fingerprints of both schemes.

_NODE = re.compile(r"^[\s:+|-]*(~?)([A-Za-z0-9]+)")
_COLUMN = re.compile(r"#(\d+)")
_DEFINITION = re.compile(r"(.*) AS (.+)#(\d+)L?(?:-T\d+ms)?")
_REFERENCE = re.compile(r"~CTERelationRef (\d+)")
_KEYS = re.compile(r"\[(.*?)\]")
_GROUPED_BY = re.compile(r"Aggregate \[(.*?)\], \[")
_WINDOW = re.compile(r"\bwindow#\d+")
_DEFINES_WINDOW = re.compile(r"named_struct\(start, .*? AS window#|Expand \[\[named_struct\(start, ")
_WINDOW_LENGTH = re.compile(r"- \d+\) \+ (\d+)")
_WINDOW_SLIDE = re.compile(r" - (-?\d+)\) % (\d+)\)")
_TOPIC_READ = re.compile(r"RelationV2\[.*?\] +kafka-")
_DECODED = "_record"
_ALL_FIELDS = "spark.sql.debug.maxToStringFields"
_STATEFUL = ("Aggregate", "Deduplicate", "FlatMapGroups", "TransformWithState", "SessionWindow", "GlobalLimit")
_BY_BATCH = ("FlatMapGroupsInPandas", "FlatMapGroupsInArrow")
"""Functions on the groups of one batch: no state, although stateful operators have similar names."""
STATEFUL_NODE = rf"(?!({'|'.join(_BY_BATCH)})$)({'|'.join(_STATEFUL)}).*"
"""The names of Spark's nodes that keep state, as a regular expression of Java and Python; a join is not among them."""
_STATELESS_ONCE = tuple(f"{name} " for name in _BY_BATCH)
"""Fingerprints of the first scheme have such nodes."""
_WALL_CLOCK = re.compile(
    r"TransformWithState.*, (Append|Update|Complete), ProcessingTime[,;]|WithState .*, ProcessingTimeTimeout(;|$)"
)
_WITH_STATE = "FlatMapGroupsInPandasWithState"
EMIT = "emit"
"""The entry of a fingerprint with an aggregation that says when its results are emitted; the sink declares it."""
MULTIPLIED = "multiplied"
"""The entry of a fingerprint with the columns among its keys that one record has several values of: hopping windows,
elements of an array, the groups of a cube. Fingerprints of earlier versions lack it."""
_FORMERLY = " formerly"
_PYTHON = re.compile(r"Python|Pandas|Arrow|PySpark")
_LOOKUP = " lookup"
"""Ends the key of a join that keeps no state, since one side is a table: it does not count if both schemes know it."""
INPUT = "input"
"""The entry of a fingerprint that changes with what the state is made of; it says nothing about its form."""
_MULTIPLIES = ("Generate", "Expand", "Join", "MapInPandas", "MapInArrow", "PythonMapInArrow", "FlatMap")
_PLAIN = (
    "Project",
    "Filter",
    "TypedFilter",
    "SubqueryAlias",
    "View",
    "Union",
    "LocalLimit",
    "Sample",
    "Repartition",
    "RepartitionByExpression",
    "RebalancePartitions",
    "ResolvedHint",
    "EventTimeWatermark",
    "CollectMetrics",
    "DeserializeToObject",
    "SerializeFromObject",
    "MapElements",
    "WithCTE",
    "CTERelationDef",
    "CTERelationRef",
)
"""Operators of Spark 4.2 that keep no state and make at most one row of each row."""
_STATIC = ("RelationV2", "LogicalRelation", "LocalRelation", "LogicalRDD", "OneRowRelation")
"""What a batch reads."""
_ORDER_DEPENDENT = ("LocalLimit", "Sample", "EventTimeWatermark")
"""Plain operators that choose among rows, or belong to streams only: a batch that has them is not read row by row."""
_ROW_BY_ROW = {*_PLAIN, *_MULTIPLIES, *_STATIC}.difference(_ORDER_DEPENDENT)
"""Operators of a batch that derive each row from one row; a join is with a table that does not change."""
_UNRECORDED = re.compile(
    r"^[\s:+|-]*(?:Relation|RelationV2|HiveTableRelation) ?\[[^\]]*\],? *(?!lookup-)(\S.*)$", re.MULTILINE
)
"""A table or files that the function reads itself, and not through a `Lookup`, whose version is in the ledger."""
_SOURCE = "StreamingRelation"
_READING = re.compile(r", (?:kafka|table)-\w+-(\w+), ")
"""The name of a reading (`FrameSource.reading_name`), which ends with the parameter of the stream's function."""
ATTRIBUTE = re.compile(r"(\w+)#(\d+)L?")
"""A column in a plan, with its id."""
_GENERATED = re.compile(r"#\d+L?|-T\d+ms|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class PlanTraits:
    """The traits of a plan that decide the path of its batches; `reads` counts the sources in the plan.

    `watermarks` counts the definitions of watermarks. `unknown` names the streaming operators that are in none of the
    lists here. `null_keys` has the equalities of full outer joins of streams under which Spark would match null with
    null. With `wall_clock`, timers of the wall clock may become due, for which Spark runs batches without an end.
    `unrecorded` are the tables and files that the function reads itself: of no batch is it known what they held.
    """

    stateful: bool
    multiplies: bool
    reads: int = 1
    unknown: tuple[str, ...] = ()
    joins_streams: bool = False
    semi_joins: bool = False
    null_keys: tuple[str, ...] = ()
    wall_clock: bool = False
    watermarks: int = 0
    unrecorded: tuple[str, ...] = ()

    @property
    def may_keep_state(self) -> bool:
        """True unless the plan surely has no state. State is computed once per batch, again when it repeats."""
        return self.stateful or bool(self.unknown)


def traits(frame: DataFrame) -> PlanTraits:
    return traits_of(analysed(frame))


def state_fingerprint(frame: DataFrame) -> dict[str, str]:
    """Every stateful node of the plan, in a form that changes only with its meaning; empty without state."""
    plan = analysed(frame)
    known = NODE in plan
    declared = declared_processors(frame._jdf.queryExecution().analyzed()) if known else ()
    return fingerprint_of(plan, declared)


def state_input(frame: DataFrame, code: str) -> str:
    """A hash of the plan up to its last stateful node; with Python in it, which a plan does not show, of `code` too."""
    plan = frame._jdf.queryExecution().analyzed()
    jvm: Any = frame.sparkSession._jvm
    nodes = streaming_nodes(analysed(frame))
    sources = sum(name.startswith(_SOURCE) for name, _ in nodes)
    first = next((n for n, (name, _) in enumerate(nodes) if keeps_state(name) or (name == "Join" and sources > 1)), 0)
    unnamed = (_SOURCE, "CollectMetrics")  # their text has what is of one start only
    lines = [name if name.startswith(unnamed) else line.lstrip(" :+|-~") for name, line in nodes[first:]]
    udf = plan.containsPattern(jvm.org.apache.spark.sql.catalyst.trees.TreePattern.PYTHON_UDF())
    text = [_GENERATED.sub("", line) for line in lines]
    opaque = udf or any(_PYTHON.search(name) for name, _ in nodes[first:])
    return hashlib.sha256("\n".join([*text, code if opaque else ""]).encode()).hexdigest()[:16]


def parameters_read(plan: str) -> list[str]:
    """The parameters of the stream's function whose sources the plan reads, in the order in which Spark counts them.

    Empty if the order is not known: the plan shows table expressions as they are defined, not as they are used.
    """
    nodes = streaming_nodes(plan)
    sources = [_READING.search(line) for name, line in nodes if name.startswith(_SOURCE)]
    if any(name == "CTERelationDef" for name, _ in nodes) or None in sources:
        return []
    return list(dict.fromkeys(match[1] for match in sources if match))


def traits_of(plan: str) -> PlanTraits:
    nodes = streaming_nodes(plan)
    sources = sum(1 for name, _ in nodes if name.startswith(_SOURCE))
    stateful = any(keeps_state(name) or (name == "Join" and sources > 1) for name, _ in nodes)
    multiplies = any(name.startswith(_MULTIPLIES) for name, _ in nodes)
    unknown = tuple(sorted({name for name, _ in nodes if not is_known(name)} | _repeated_references(nodes)))
    joins = [line for name, line in nodes if name == "Join" and sources > 1]
    null_keys = tuple(key for line in joins for key in _null_keys(line))
    wall_clock = any(keeps_state(name) and _WALL_CLOCK.search(line) for name, line in nodes)
    return PlanTraits(
        stateful,
        multiplies,
        sources,
        unknown,
        joins_streams=bool(joins),
        semi_joins=any("Join LeftSemi" in line for line in joins),
        null_keys=null_keys,
        wall_clock=wall_clock,
        watermarks=sum(name == "EventTimeWatermark" for name, _ in nodes),
        unrecorded=tuple(sorted({_GENERATED.sub("", name) for name in _UNRECORDED.findall(plan)})),
    )


def has_wall_clock(fingerprint: Mapping[str, str]) -> bool:
    """True if the state has timers, or times to live, of the wall clock."""
    return any(_WALL_CLOCK.search(text) for text in fingerprint.values())


def _null_keys(join: str) -> Iterator[str]:
    """Yields the equalities of a full outer join whose condition does not rule out that both sides are null.

    Spark's join of streams compares keys as bytes. It infers `isnotnull` for the sides of every other kind of join.
    """
    _, full_outer, condition = join.partition("Join FullOuter, ")
    for conjunct in condition.split(" AND ") if full_outer else ():
        left, equal, right = conjunct.strip("() ").partition(" = ")
        if equal and not any(f"isnotnull({side})" in condition for side in (left, right)):
            yield _GENERATED.sub("", f"{left} = {right}")


def not_row_by_row(nodes: Iterable[str], sources: int) -> tuple[str, ...]:
    """The streaming nodes, of those named, that keep state or may keep it: rows may then depend on earlier records.

    With several `sources` a join may be one of two streams, which keeps state.
    """
    stateful = (name for name in nodes if keeps_state(name) or (sources > 1 and name.startswith("Join")))
    return tuple(sorted({*stateful, *(name for name in nodes if not is_known(name))}))


@dataclass(frozen=True)
class EventWindows:
    """Windows of event time, in microseconds: one of each `length` begins `start` after every multiple of `slide`."""

    length: int
    slide: int
    start: int


@dataclass(frozen=True)
class BatchPlanTraits:
    """The traits of a plan on batch frames that decide which records a row depends on.

    `reads` counts reads of topics. `windows` has None for windows whose length the plan does not show. `others` names
    the operators whose rows may depend on any record.
    """

    reads: int
    session_windows: bool
    unwindowed_aggregate: bool
    windows: tuple[EventWindows | None, ...]
    others: tuple[str, ...]


def batch_traits_of(plan: str) -> BatchPlanTraits:
    lines = plan.splitlines()
    nodes = [(match[2], line) for line in lines if (match := _NODE.match(line))]
    aggregates = [_GROUPED_BY.search(line) for name, line in nodes if name == "Aggregate"]
    windows = [_event_windows(line) for line in lines if _DEFINES_WINDOW.search(line)]
    return BatchPlanTraits(
        reads=len(_TOPIC_READ.findall(plan)),
        session_windows="session_window#" in plan,
        unwindowed_aggregate=any(keys is None or not _WINDOW.search(keys[1]) for keys in aggregates),
        windows=tuple(windows),
        others=tuple(sorted({name for name, _ in nodes} - _ROW_BY_ROW - {"Aggregate"})),
    )


def _event_windows(line: str) -> EventWindows | None:
    length, slide = _WINDOW_LENGTH.search(line), _WINDOW_SLIDE.search(line)
    if length is None or slide is None:
        return None
    return EventWindows(int(length[1]), int(slide[2]), int(slide[1]))


def fingerprint_of(plan: str, declared: Sequence[str] = ()) -> dict[str, str]:
    """The fingerprint of a plan given as text, and of the processors in it, in their order."""
    traits_seen = traits_of(plan)
    if not traits_seen.stateful:
        return {}
    known, multiplied, waiting = definitions(plan), _multiplied(plan), iter(declared)
    nodes = [(name, line.lstrip(" :+|-~")) for name, line in streaming_nodes(plan)]
    fingerprint: dict[str, str] = {}
    further: dict[str, None] = {}
    for (name, line), (_, below) in zip(nodes, [*nodes[1:], ("", "")], strict=True):
        if not (keeps_state(name) or name.startswith("Join")):
            continue
        index = str(sum(not key.endswith(_FORMERLY) for key in fingerprint))
        if name.startswith("Join") and not traits_seen.joins_streams:
            index += _LOOKUP
        meaning = _meaning(line, known)
        if name in (NODE, _WITH_STATE):
            fingerprint[index + _FORMERLY] = meaning
            line = _keyed(line, below) if name == NODE else _called(line)
            meaning = _meaning(line, known)
        fingerprint[index] = "; ".join([meaning, *islice(waiting, name == NODE)])
        shown = _texts(line, known)
        further |= dict.fromkeys(text for text in _texts(line, {**multiplied, **known}) if text not in shown)
    if further:
        fingerprint[MULTIPLIED] = "; ".join(further)
    return fingerprint


def comparable(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Two fingerprints without what only one of their schemes has, and without joins that keep no state.

    A fingerprint of an earlier scheme does not tell these joins from others. They stay if the other one then equals it.
    """
    with_joins = _in_common(one, other)
    if with_joins[0] == with_joins[1]:
        return with_joins
    kept = [{key: text for key, text in each.items() if not key.endswith(_LOOKUP)} for each in (one, other)]
    return _in_common(kept[0], kept[1])


def _in_common(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    both = [{key: text for key, text in each.items() if not text.startswith(_STATELESS_ONCE)} for each in (one, other)]
    first_scheme = [not any(key.endswith(_FORMERLY) for key in each) for each in both]
    shared = [name for name in (EMIT, MULTIPLIED) if all(name in each for each in both)]
    in_common = []
    for each in both:
        keys = [key for key in each if not key.endswith(_FORMERLY) and key not in (EMIT, MULTIPLIED, INPUT)]
        suffix = _FORMERLY if any(first_scheme) else ""
        numbered = {str(index): each.get(key + suffix, each[key]) for index, key in enumerate(keys)}
        in_common.append({**numbered, **{name: each[name] for name in shared}})
    return in_common[0], in_common[1]


def has_aggregate(fingerprint: Mapping[str, str]) -> bool:
    """True if there is state of an aggregation, whose results are emitted at each change or when they are final."""
    return any(text.startswith("Aggregate ") for text in fingerprint.values())


def _keyed(node: str, below: str) -> str:
    """A processor's node with its keys, which are the first columns of the projection below it."""
    name, _, rest = node.partition(" ")
    _, count, _, output_mode, time_mode, *_ = (part.strip() for part in parts(rest))
    columns = parts(below[below.find("[") + 1 : below.rfind("]")])[: int(count)]
    keys = ", ".join(column.strip() for column in columns)
    return f"{name} [{keys}], {output_mode}, {time_mode}"


def _called(node: str) -> str:
    """The node of a function that keeps state of its own, without the columns that it gets and returns."""
    name, _, rest = node.partition(" ")
    call, keys, _, *state = (part.strip() for part in parts(rest))
    return f"{name} {call.partition('(')[0]} {keys}, {', '.join(state)}"


def streaming_nodes(plan: str) -> list[tuple[str, str]]:
    """Name and line of each streaming node; an aggregate of a static table keeps no state."""
    matches = ((_NODE.match(line), line) for line in plan.splitlines())
    return [(match[2], line) for match, line in matches if match and match[1]]


def _repeated_references(nodes: list[tuple[str, str]]) -> set[str]:
    """The operator that refers to a table expression (`WITH x AS ...`), if one is used twice.

    The plan shows its source once, so a join with itself, which keeps state, does not look like one of two streams.
    """
    named = [match[1] for _, line in nodes if (match := _REFERENCE.search(line))]
    return set() if len(named) == len(set(named)) else {"CTERelationRef"}


def keeps_state(name: str) -> bool:
    return name.startswith(_STATEFUL) and name not in _BY_BATCH


def is_known(name: str) -> bool:
    return name in _PLAIN or name.startswith((*_STATEFUL, *_MULTIPLIES, _SOURCE))


def _meaning(node: str, known: Mapping[str, str]) -> str:
    return "; ".join(_texts(node, known))


def _texts(node: str, known: Mapping[str, str]) -> list[str]:
    """A node, and the definitions of the columns in its first list (its keys), followed back to the source.

    The definition of `_record` is left out: it is the format's, and a further field in it changes no state.
    """
    keys = _KEYS.search(node)
    texts, waiting = [node], _COLUMN.findall(keys[1] if keys else node)
    for column in waiting:
        definition = known.get(column)
        if definition is not None and definition not in texts and not definition.endswith(f" AS {_DECODED}"):
            texts.append(definition)
            waiting += _COLUMN.findall(definition)
    return [_GENERATED.sub("", part) for part in texts]


def _multiplied(plan: str) -> dict[str, str]:
    """The definition of each column of which an operator makes several values from one row, by the column's id.

    `Generate` has one expression. `Expand` has a list of expressions for each row that it makes; the definition has the
    first one, which shows length and slide of a window, and a hash of all.
    """
    by_column: dict[str, str] = {}
    for name, line in streaming_nodes(plan):
        made_by, _, columns = line.lstrip(" :+|-~").removeprefix(f"{name} ").rpartition(", [")
        made = ATTRIBUTE.findall(columns)
        if name == "Generate":
            by_column |= {column: f"{made_by} AS {label}" for label, column in made}
        elif name == "Expand":
            rows = [[value.strip() for value in parts(row.strip()[1:-1])] for row in parts(made_by[1:-1])]
            if any(len(row) != len(made) for row in rows):
                continue  # a text in it has a bracket
            for (label, column), values in zip(made, zip(*rows, strict=True), strict=True):
                if len(set(values)) > 1:
                    every = hashlib.sha256(_GENERATED.sub("", "; ".join(values)).encode()).hexdigest()[:16]
                    by_column[column] = f"{values[0]} and {every} AS {label}"
    return by_column


def definitions(plan: str) -> dict[str, str]:
    """The definition of each column that a projection computes, by the column's id."""
    by_column = {}
    for name, line in streaming_nodes(plan):
        if name != "Project":
            continue
        for part in parts(line[line.find("[") + 1 : line.rfind("]")]):
            if match := _DEFINITION.fullmatch(part.strip()):
                by_column[match[3]] = f"{match[1]} AS {match[2]}"
    return by_column


def parts(text: str) -> list[str]:
    """The members of a list, split at the commas outside of brackets."""
    members, depth, begin = [], 0, 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            members.append(text[begin:position])
            begin = position + 1
    return [*members, text[begin:]]


def analysed(frame: DataFrame) -> str:
    """The plan's text with all columns."""
    with all_fields_shown(frame.sparkSession):
        return str(frame._jdf.queryExecution().analyzed().toString())


@contextmanager
def all_fields_shown(session: SparkSession) -> Iterator[None]:
    """Plans have all columns in their text: by default Spark leaves out those after the 25th."""
    with set_to(session, _ALL_FIELDS, "100000"):
        yield


@contextmanager
def set_to(session: SparkSession, key: str, value: str) -> Iterator[None]:
    """The session's configuration has this value meanwhile; a query keeps what was set when it started."""
    before = session.conf.get(key, None)
    session.conf.set(key, value)
    try:
        yield
    finally:
        if before is None:
            session.conf.unset(key)
        else:
            session.conf.set(key, before)


_EXCLUDED = "spark.sql.optimizer.excludedRules"


@contextmanager
def without_rules(session: SparkSession, rules: Iterable[str]) -> Iterator[None]:
    """Spark optimises without these rules of org.apache.spark.sql.catalyst.optimizer meanwhile.

    A running query has a session of its own, and its own rules.
    """
    before = session.conf.get(_EXCLUDED, None)
    excluded = [f"org.apache.spark.sql.catalyst.optimizer.{rule}" for rule in rules]
    with set_to(session, _EXCLUDED, ",".join(excluded if not before else [before, *excluded])):
        yield
