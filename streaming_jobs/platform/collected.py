"""A frame's rows in this process, as `DataFrame.toArrow` collects them, with 2 calls of the JVM instead of 24.

PySpark asks the JVM for each setting, for the schema, and for each item of the list that says where the rows are
served. A call takes a third of a millisecond on a busy machine, as much in all as the topic's transaction.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import structlog

from streaming_jobs.platform.spark_jvm import new_object

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

log = structlog.get_logger()

_SERVED_ROWS = """
public class ServedRows implements java.util.function.Function {
    private final java.util.Map servers = new java.util.concurrent.ConcurrentHashMap();
    private final java.util.concurrent.atomic.AtomicLong count = new java.util.concurrent.atomic.AtomicLong();

    public Object apply(Object what) {
        if (what instanceof String) { // the number of a server: waits, and throws what went wrong
            return ((org.apache.spark.security.SocketAuthServer) servers.remove(what)).getResult();
        }
        org.apache.spark.sql.classic.Dataset frame = (org.apache.spark.sql.classic.Dataset) what;
        boolean large = frame.sparkSession().sessionState().conf().arrowUseLargeVarTypes();
        Object[] served = frame.collectAsArrowToPython();
        String number = Long.toString(count.incrementAndGet()); // a port may be taken again before its rows are read
        servers.put(number, served[2]);
        String secret = served[1] == null ? "" : served[1].toString();
        String separator = "\\n";
        return String.join(separator, new CharSequence[] {
            number, served[0].toString(), secret, Boolean.toString(large), frame.schema().json()});
    }
}
"""


def to_arrow(frame: DataFrame) -> pa.Table:
    """The rows of a frame; raises what `DataFrame.toArrow` raises.

    It is called for frames that are not Spark's own, and where the JVM lacks the interface, which is private.
    """
    session = getattr(frame, "sparkSession", None)
    served = None if getattr(frame, "_jdf", None) is None else _served_rows(session)
    return frame.toArrow() if served is None else _collected(served, frame)


def _collected(served: Any, frame: DataFrame) -> pa.Table:
    """As `_collect_as_arrow` of PySpark 4.2, which leaves an order of the batches behind them."""
    import pyarrow as pa
    from pyspark.errors.exceptions.captured import unwrap_spark_exception
    from pyspark.sql.pandas.serializers import ArrowCollectSerializer
    from pyspark.util import _load_from_socket

    number, where, secret, large, schema = str(served.apply(frame._jdf)).split("\n", 4)
    address: Any = (int(where) if where.isdigit() else where, secret or None)
    try:
        with _load_from_socket(address, ArrowCollectSerializer()) as stream:  # type: ignore[no-untyped-call]
            *batches, order = stream
    finally:
        with unwrap_spark_exception():
            served.apply(number)
    fields = _arrow_schema(schema, large=large == "true")
    if not batches:
        return fields.empty_table()
    return pa.Table.from_batches([batches[index] for index in order]).cast(fields)


@lru_cache(maxsize=64)
def _arrow_schema(schema: str, *, large: bool) -> pa.Schema:
    """That of `DataFrame.toArrow`, for a schema in Spark's JSON."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import _parse_datatype_json_string

    return to_arrow_schema(
        _parse_datatype_json_string(schema),  # type: ignore[arg-type]
        error_on_duplicated_field_names_in_struct=True,
        timezone="UTC",
        prefers_large_types=large,
    )


_PRIVATE = (
    ("pyspark.errors.exceptions.captured", "unwrap_spark_exception"),
    ("pyspark.sql.pandas.serializers", "ArrowCollectSerializer"),
    ("pyspark.sql.types", "_parse_datatype_json_string"),
    ("pyspark.util", "_load_from_socket"),
)
"""What is used here of PySpark that it does not promise; without one of them, rows take PySpark's own way."""

_BY_GATEWAY: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The object of each JVM; None for a JVM that has no such interface."""


def _served_rows(session: Any) -> Any:
    gateway = session.sparkContext._gateway
    if gateway not in _BY_GATEWAY:
        try:
            for module, name in _PRIVATE:
                getattr(import_module(module), name)
            _BY_GATEWAY[gateway] = new_object(session, "ServedRows", _SERVED_ROWS)
        except Exception as error:  # noqa: BLE001 - only speed is lost
            log.info("rows are collected by PySpark's own way", reason=str(error)[:300])
            _BY_GATEWAY[gateway] = None
    return _BY_GATEWAY[gateway]
