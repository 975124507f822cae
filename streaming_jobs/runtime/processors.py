"""What the processors of `transformWithState` declare: their name and their state, which Spark's plan does not show.

The plan holds each processor as pickled bytes. A copy is made of them, and its `init` is called with a handle that only
notes what is declared; Spark itself calls `init` once before the first batch, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor
    from pyspark.sql.types import StructType

log = structlog.get_logger()

NODE = "TransformWithStateInPySpark"


class DeclaredState:
    """A handle for `init` of a processor: notes the declared state variables, and holds no state."""

    def __init__(self) -> None:
        self.variables: list[str] = []

    def getValueState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> None:  # noqa: N802, N803
        """Note a value."""
        self._note("value", stateName, _type(schema), ttlDurationMs)

    def getListState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> None:  # noqa: N802, N803
        """Note a list."""
        self._note("list", stateName, _type(schema), ttlDurationMs)

    def getMapState(  # noqa: N802
        self,
        stateName: str,  # noqa: N803
        userKeySchema: StructType | str,  # noqa: N803
        valueSchema: StructType | str,  # noqa: N803
        ttlDurationMs: int | None = None,  # noqa: N803
    ) -> None:
        """Note a map."""
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
