"""JSON in Spark: each verdict is the one of the strict reading in Python, and each good record holds its values.

The corpora are judged in one Spark job each: records made by hypothesis for two schemas, and broken in every way
that a record can be broken.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from streaming_jobs.errors import UsageError
from streaming_jobs.formats import REQUIRED_CONF, Json
from streaming_jobs.formats.json_reading import Refused, read_record

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def required(name: str, kind: DataType) -> StructField:
    return StructField(name, kind, nullable=False)


PLACE = StructType([required("city", StringType()), StructField("zip", StringType()), StructField("lat", DoubleType())])
LEG = StructType(
    [required("to", StringType()), StructField("at", TimestampType()), StructField("cost", DecimalType(5, 1))]
)
RICH = StructType(
    [
        required("id", LongType()),
        required("name", StringType()),
        StructField("tiny", ByteType()),
        StructField("small", ShortType()),
        StructField("whole", IntegerType()),
        StructField("ok", BooleanType()),
        StructField("real", DoubleType()),
        StructField("single", FloatType()),
        StructField("money", DecimalType(9, 2)),
        StructField("note", StringType()),
        StructField("day", DateType()),
        StructField("at", TimestampType()),
        StructField("local", TimestampNTZType()),
        StructField("place", PLACE),
        StructField("tags", ArrayType(StringType(), containsNull=False)),
        StructField("sizes", ArrayType(IntegerType())),
        StructField("legs", ArrayType(LEG, containsNull=False)),
        StructField("deep", StructType([required("er", StructType([required("x", IntegerType())]))])),
        StructField("grid", ArrayType(ArrayType(DoubleType()))),
    ]
)
FLAT = StructType([RICH[name] for name in ("id", "name", "whole", "ok", "real", "note", "at")])
WITHOUT_TEXT = StructType([RICH["id"], StructField("whole", IntegerType())])

# Values as they are written; some fit some field, many fit none, some are not JSON.
ODD = (
    *(
        "0",
        "-0",
        "1",
        "-1",
        "1.0",
        "1e2",
        "1E+2",
        "0.5",
        "1.25",
        "1.5e-3",
        "127",
        "128",
        "-129",
        "200",
        "32768",
        "40000",
    ),
    *("2147483648", "-2147483649", "9223372036854775807", "9223372036854775808", "1e400", "-1e400", "3.5e38", "1e-400"),
    *("12345678.90", "1234567.89", "1.230", "0.001", "9" * 38, "9" * 39, "1." + "0" * 40, "9" * 1000, "9" * 1001),
    *("01", ".5", "1.", "+1", "0x1F", "1_000", "--1", "1e", "NaN", "Infinity", "-Infinity", "tru", "nulls", "True"),
    *(
        "true",
        "false",
        "null",
        "{}",
        "[]",
        "[1]",
        '{"a":1}',
        '{"a":1,"a":2}',
        '[{"to":"x"}]',
        '[{"to":null}]',
        "[null]",
    ),
    *('{"city":"x"}', '{"city":5}', '{"city":null}', '{"er":{"x":1}}', '{"er":{}}', '{"er":null}', "[[1.5],[null]]"),
    *('["a","5"]', '["a",5]', '["a",null]', '[{"to":"x","at":5}]', '[{"to":"7","cost":1.25}]', "[[[]]]", '"x'),
    *('""', '" "', '"x"', '"5"', '"-1.5e3"', '"1.2.3"', '"9E"', '"-"', '"true"', '"false"', '"null"', '"{}"', '"[1]"'),
    *(
        '"{"',
        '"]"',
        '"}"',
        '"NaN"',
        '"Infinity"',
        '"\\"Infinity\\""',
        '"\\"x"',
        '"1,5"',
        '"\\u0000"',
        '"\\u007d"',
        "'x'",
    ),
    *(
        '"\\ud800"',
        '"\\ud83d\\ude00"',
        '"\\ude00\\ud83d"',
        '"\\\\ud800"',
        '"\\ud83d\\\\\\ude00"',
        '"\\x"',
        '"a\tb"',
        '"é"',
    ),
    *('"\\u00e9"', '"\\u005d"', '"\\u0001"', '"\\\\u0001"', '"2013-01-01"', '"2013-02-29"', '"2013-1-1"'),
    *(
        f'"2013-01-01T05:06:07{rest}"'
        for rest in ("", "Z", "z", ".5", ".123456789Z", "+05:30", "-0530", "+18:01", " UTC")
    ),
    *('"2013-01-01 05:06:07"', '"2013-01-01T05:06Z"', '"2013"', '"12:30:00"', '"T12:30:00Z"', '"2013-01-01T24:00:00Z"'),
    *('"0000-01-01T00:00:00Z"', '"0001-01-01T00:00:00"', '"9999-12-31T23:59:59Z"', '"9999-12-31T23:59:59-01:00"'),
    *(
        '"0001-01-01T00:00:00+01:00"',
        '"2013-01-01T05:06:07Z\\n"',
        '" 2013-01-01T05:06:07Z"',
        '"2013-13-01"',
        "1357016767",
    ),
)
PIECES = (
    *(
        '{"',
        '"}',
        "{",
        "}",
        "[",
        "]",
        '"',
        ",",
        ":",
        "\\",
        "\\u",
        "\\ud83d",
        " ",
        "\n",
        "\t",
        "\0",
        "\x0b",
        "\u00a0",
        "\ufeff",
    ),
    *(
        "},{",
        "}{",
        '],"x":[',
        '},"x":{',
        "null",
        "true",
        "1",
        "-",
        "e",
        ".",
        "//",
        "/* */",
        "#",
        "é",
        "😀",
        '"\\u0001":true',
        '"\\u0001":null',
        "\\u0001",
    ),
)
BYTES = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe2\x82", b"\x80", b"\xef\xbb\xbf", b"\0")

GOOD = (
    b'{"id":1,"name":"x"}',
    b'{ "name" : "x" , "id" : 1 }\r\n',
    b' \t{"id":1,"name":"x"} \n',
    b'{"id":-0,"name":""}',
    b'{"id":1,"name":"5","note":"true"}',
    b'{"id":1,"name":"{}","note":"[1]"}',
    b'{"id":1,"name":"\\"Infinity\\""}',
    b'{"id":1,"name":"}"}',
    b'{"id":1,"name":"x","other":[{"deep":[1,2,{"a":"]}"}]}]}',
    b'{"id":1,"name":"x","other":NULL}'.replace(b"NULL", b"null"),
    b'{"id":1,"id":2,"name":"first","name":"last"}',
    b'{"id":"x"}{}'.replace(b'"x"}{}', b'2,"name":"x"}'),
    b'{"id":1,"name":"\\ud83d\\ude00 \\\\ud800"}',
    b'{"id":1,"name":"x","ID":"other case, other field"}',
    b'{"id":1,"name":"x","\\u0001":null,"other":{}}',
    b'{"id":1,"name":"\\u0001","other":{"\\u0001":"x"}}',
    b'{"id":1,"name":"x","z":' + b"[" * 199 + b"]" * 199 + b"}",
    b'{"id":1,"name":"x","z":' + b"9" * 1000 + b"}",
    b'{"id":1,"name":"x","' + b"k" * 50_000 + b'":1}',
)
BAD = (
    *(
        b"",
        b" ",
        b"\n\t",
        b"null",
        b"[]",
        b"{}",
        b"5",
        b'"x"',
        b"true",
        b'[{"id":1,"name":"x"}]',
        b"}",
        b"{",
        b"]",
        b"}}",
    ),
    *(GOOD[0][:length] for length in range(len(GOOD[0]))),
    *(GOOD[0] + junk for junk in (b"x", b"}", b"]", b",", b"1", b"{}", b"\0", b"\x0b", b"\xc2\xa0", b" //", b' "x"')),
    *(junk + GOOD[0] for junk in (b"x", b"\xef\xbb\xbf", b",", b"\0", b"{", b"[", b"1", b"null")),
    *(GOOD[0] + between + GOOD[0] for between in (b"", b",", b" ", b"\n", b'],"x":[', b'},"x":{', b'}],"x":[{')),
    b'{"id":1,"name":"x"},"other":{}',
    b'{"id":1,"name":"x"},"other":true',
    b"{'id':1,'name':'x'}",
    b'{"id":1,"name":"x",}',
    b'{"id":1 "name":"x"}',
    b'{"id":1,"name":5}',
    b'{"id":1,"name":1e400}',
    b'{"id":1,"name":{"a":1,"a":2}}',
    b'{"id":1,"name":"first","name":5}',
    b'{"id":"x","id":1,"name":"x"}',
    b'{"id":1,"id":null,"name":"x"}',
    b'{"id":1,"name":"\\ud83d"}',
    b'{"id":1,"name":"x","other":"\\ude00"}',
    b'{"id":1,"name":"\xff"}',
    b'{"id":1,"name":"x","other":"\xed\xa0\x80"}',
    b'{"id":1,"name":"a\tb"}',
    b'{"id":1,"name":"x","z":' + b"[" * 200 + b"]" * 200 + b"}",
    b'{"id":1,"name":"x","z":' + b"9" * 1001 + b"}",
    b'{"id":1,"name":"x","' + b"k" * 50_001 + b'":1}',
    b'{"id":1,"name":"x","\\u0001":true}',
    b'{"id":1,"name":"x","\\u0001":true,"x":{}}',
    b'{"id":1,"name":"x","\\u0001":null,"\\u0001":true}',
    b'{"id":1,"name":"x","\\u0001":true}{"x":{}}',
    b'{"id":1,"name":"x"}{"\\u0001":true}',
    b'{"id":1,"name":"x"},"\\u0001":true}',
    b'{"id":1,"name":"x","\\u0001":true},"x":{}}',
    b'{"id":1,"name":"x","\x01":true}',
)


@pytest.fixture(scope="module")
def corpus() -> list[bytes]:
    """Records of `RICH` and what becomes of them when they break, about 20,000 values."""
    made: list[bytes] = []

    @seed(20131231)
    @settings(max_examples=1500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(record=st.one_of(texts(RICH), texts(RICH, sparse=True)), shuffle=st.integers(0, 2**32))
    def collect(record: str, shuffle: int) -> None:
        chance = random.Random(shuffle)
        made.append(record.encode())
        made.extend(broken(record, chance) for _ in range(12))

    collect()
    return made


def texts(kind: DataType, *, sparse: bool = False) -> st.SearchStrategy[str]:
    """Valid texts of a type."""
    if isinstance(kind, StructType):
        fields = {
            field.name: texts(field.dataType, sparse=sparse) if not field.nullable else field_texts(field, sparse)
            for field in kind.fields
        }
        return st.tuples(
            st.fixed_dictionaries(fields), st.sampled_from(((",", ":"), (", ", ": "), (" ,\n", "\t: ")))
        ).map(lambda made: object_text(*made))
    if isinstance(kind, ArrayType):
        item = texts(kind.elementType, sparse=sparse)
        items = st.lists(st.one_of(item, st.just("null")) if kind.containsNull else item, max_size=3)
        return items.map(lambda made: f"[{','.join(made)}]")
    return {
        LongType: st.integers(-(2**63), 2**63 - 1).map(str),
        IntegerType: st.integers(-(2**31), 2**31 - 1).map(str),
        ShortType: st.integers(-(2**15), 2**15 - 1).map(str),
        ByteType: st.integers(-128, 127).map(str),
        BooleanType: st.sampled_from(("true", "false")),
        DoubleType: st.floats(allow_nan=False, allow_infinity=False).map(json.dumps),
        FloatType: st.floats(width=32, allow_nan=False, allow_infinity=False).map(json.dumps),
        DecimalType: st.decimals(-9999, 9999, places=1).map(str),
        StringType: st.builds(json.dumps, strings(), ensure_ascii=st.booleans()),
        DateType: st.dates().map(lambda day: f'"{day.isoformat()}"'),
        TimestampType: st.builds("{}{}".format, clocks(), st.sampled_from(("", "Z", "+05:30", "-11:00"))).map(
            json.dumps
        ),
        TimestampNTZType: clocks().map(json.dumps),
    }[type(kind)]


def field_texts(field: StructField, sparse: bool) -> st.SearchStrategy[str | None]:
    absent = st.sampled_from((None, "null"))
    return st.one_of(absent, absent, texts(field.dataType)) if sparse else texts(field.dataType)


def object_text(fields: dict[str, str | None], separators: tuple[str, str]) -> str:
    comma, colon = separators
    return "{" + comma.join(f'"{name}"{colon}{text}' for name, text in fields.items() if text is not None) + "}"


def strings() -> st.SearchStrategy[str]:
    plain = st.text(st.characters(codec="utf-8"), max_size=8)
    return st.one_of(
        plain, st.sampled_from(("5", "-1.5", "true", "false", "{}", "[]", "}", "]", "9E", '"', "\\", "null"))
    )


def clocks() -> st.SearchStrategy[str]:
    return st.datetimes(datetime(2, 1, 1), datetime(9998, 12, 31)).map(datetime.isoformat)


def broken(record: str, chance: random.Random) -> bytes:
    """The record after one to three accidents."""
    text = record
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        text = chance.choice(ACCIDENTS)(text, chance)
    value = text.encode("utf-8", "surrogatepass")
    if chance.random() < 0.05:
        place = chance.randint(0, len(value))
        value = value[:place] + chance.choice(BYTES) + value[place:]
    return value


def cut_off(text: str, chance: random.Random) -> str:
    return text[: chance.randint(0, len(text))]


def remove(text: str, chance: random.Random) -> str:
    start = chance.randint(0, len(text))
    return text[:start] + text[start + chance.randint(1, 5) :]


def insert(text: str, chance: random.Random) -> str:
    place = chance.randint(0, len(text))
    return text[:place] + chance.choice(PIECES) + text[place:]


def append(text: str, chance: random.Random) -> str:
    return text + chance.choice((chance.choice(PIECES), chance.choice(ODD), text, chance.choice(PIECES) + text))


def prepend(text: str, chance: random.Random) -> str:
    return chance.choice((*PIECES, "[", "null", " ")) + text


def swap(text: str, chance: random.Random) -> str:
    if not text:
        return text
    one, other = sorted(chance.choices(range(len(text)), k=2))
    return text if one == other else text[:one] + text[other] + text[one + 1 : other] + text[one] + text[other + 1 :]


def other_value(text: str, chance: random.Random) -> str:
    """Another value for a field, of whatever type."""
    values = list(re.finditer(r'(?<=:)\s*("(?:[^"\\]|\\.)*"|[^\s,{}\[\]"]+|\{\}|\[\])', text))
    if not values:
        return text
    match = chance.choice(values)
    return text[: match.start()] + chance.choice(ODD) + text[match.end() :]


def one_more_field(text: str, chance: random.Random) -> str:
    """A field once more, or one that no schema has, at the front or at the end."""
    name = chance.choice((*RICH.fieldNames(), "city", "to", "x", "other", "Id", "\\u0001", "\\\\u0001", "\\u0069d"))
    field = f'"{name}":{chance.choice(ODD)}'
    return text.replace("{", f"{{{field},", 1) if chance.random() < 0.5 else text.rstrip()[:-1] + f",{field}}}"


def missing(text: str, chance: random.Random) -> str:
    """A field without its name, so to speak."""
    name = chance.choice((*RICH.fieldNames(), "id", "name", "city", "to", "x"))
    return text.replace(f'"{name}"', '"absent"', 1)


ACCIDENTS = (
    *(cut_off, remove, insert, append, prepend, swap),
    *(other_value, other_value, other_value, other_value, other_value, other_value),
    *(one_more_field, one_more_field, one_more_field, one_more_field, missing, missing),
)


def frame(spark: SparkSession, values: Sequence[bytes | None]) -> DataFrame:
    """The values as a frame that Spark runs code for; a local relation would be evaluated by its optimizer."""
    table = pa.table({"i": pa.array(range(len(values))), "value": pa.array(values, pa.binary())})
    return spark.createDataFrame(table).repartition(2)


def judged(spark: SparkSession, schema: StructType, values: Sequence[bytes | None]) -> list[tuple[bool, Any]]:
    """Verdict and record of each value, by Spark."""
    decoded = Json(schema).decode(frame(spark, values), "value")
    shown = decoded.select("i", "_bad", F.when(~F.col("_bad"), F.col("_record")).alias("record"))
    rows = sorted(shown.toArrow().to_pylist(), key=lambda row: row["i"])
    return [(row["_bad"], row["record"]) for row in rows]


def read(schema: StructType, value: bytes | None) -> Any:
    """The record by the strict reading, times in UTC; None where it refuses."""
    try:
        return in_utc(read_record(schema, value))
    except Refused:
        return None


def in_utc(parsed: Any) -> Any:
    if isinstance(parsed, dict):
        return {name: in_utc(value) for name, value in parsed.items()}
    if isinstance(parsed, list):
        return [in_utc(item) for item in parsed]
    return parsed.astimezone(UTC) if isinstance(parsed, datetime) and parsed.tzinfo else parsed


def disagreements(spark: SparkSession, schema: StructType, values: Sequence[bytes | None]) -> list[Any]:
    """Values on which the halves differ, in verdict or in content."""
    differing = []
    for value, (bad, record) in zip(values, judged(spark, schema, values), strict=True):
        strict = read(schema, value)
        if bad is not (strict is None) or (not bad and record != strict):
            differing.append({"value": value, "spark": "refused" if bad else record, "python": strict or "refused"})
    return differing


@pytest.mark.timeout(600)
@pytest.mark.parametrize("schema", [RICH, FLAT, WITHOUT_TEXT], ids=["rich", "flat", "without_text"])
def test_spark_and_the_strict_reading_agree_on_every_record(
    spark: SparkSession, corpus: list[bytes], schema: StructType
) -> None:
    refused = sum(read(schema, value) is None for value in corpus)
    assert len(corpus) * 0.1 < refused < len(corpus) * 0.95, "the corpus has to hold both kinds"
    assert disagreements(spark, schema, corpus)[:3] == []


@pytest.mark.parametrize("field", RICH.fields, ids=RICH.fieldNames())
def test_every_odd_value_of_every_type_has_the_verdict_of_the_strict_reading(
    spark: SparkSession, field: StructField
) -> None:
    schema = StructType([field])
    values = [f'{{"{field.name}":{text}}}'.encode("utf-8", "surrogatepass") for text in ODD]
    values += [f'{{"{field.name}":{text},"other":{{}}}}'.encode("utf-8", "surrogatepass") for text in ODD]
    assert disagreements(spark, schema, values) == []


@pytest.mark.parametrize("schema", [RICH, FLAT], ids=["rich", "flat"])
def test_written_examples_have_their_verdict(spark: SparkSession, schema: StructType) -> None:
    assert [value for value, (bad, _) in zip(GOOD, judged(spark, schema, GOOD), strict=True) if bad] == []
    assert [value for value, (bad, _) in zip(BAD, judged(spark, schema, BAD), strict=True) if not bad] == []
    assert disagreements(spark, schema, [*GOOD, *BAD, None]) == []


def test_verdicts_do_not_depend_on_ansi_mode(spark: SparkSession) -> None:
    session = spark.newSession()
    for name, value in {**REQUIRED_CONF, "spark.sql.ansi.enabled": "false"}.items():
        session.conf.set(name, value)
    assert disagreements(session, RICH, [*GOOD, *BAD, None]) == []
    session.conf.set("spark.sql.ansi.enabled", "true")
    assert disagreements(session, RICH, [*GOOD, *BAD, None]) == []


def test_the_last_of_two_fields_wins(spark: SparkSession) -> None:
    values = [b'{"id":1,"name":"a","id":2,"name":"7","other":{}}', b'{"id":1,"name":"a","name":7}']
    (good, record), (bad, _) = judged(spark, FLAT, values)
    assert (good, record["id"], record["name"]) == (False, 2, "7")
    assert bad is True


def test_a_null_value_is_bad_and_fails_nothing(spark: SparkSession) -> None:
    assert judged(spark, RICH, [None]) == [(True, None)]


def test_the_frame_keeps_its_columns_and_gets_two(spark: SparkSession) -> None:
    decoded = Json(RICH).decode(frame(spark, [b"{}"]).withColumn("key", F.lit(1)), "value")
    assert decoded.columns == ["i", "value", "key", "_record", "_bad"]
    assert not decoded.schema["_bad"].nullable
    record_type = decoded.schema["_record"].dataType
    assert isinstance(record_type, StructType)
    assert [(f.name, f.dataType.simpleString()) for f in record_type] == [
        (f.name, f.dataType.simpleString()) for f in RICH
    ]


def test_a_record_is_parsed_once_whatever_is_asked_of_it(spark: SparkSession) -> None:
    decoded = Json(FLAT).decode(frame(spark, [b"{}"]), "value")
    query = decoded.where("not _bad").select("_record.*").where("whole > 3 and name <> 'x'").groupBy("name").count()
    plan = query._jdf.queryExecution().optimizedPlan().toString()
    parsing = [line for line in plan.splitlines() if "StructField(id,LongType" in line]
    assert "Filter" in plan, "the plan has lost its filters"
    assert len(parsing) == 1, "more than one step of the plan parses records"
    assert "Project" in parsing[0]
    assert parsing[0].count("StructField(id,LongType") == 2, "one branch for ordinary values, one for the others"


def test_a_verdict_does_not_depend_on_the_columns_in_use(spark: SparkSession) -> None:
    values = [b'{"id":1,"name":"x","whole":"no number"}', b'{"id":1,"name":"x"}']
    decoded = Json(FLAT).decode(frame(spark, values), "value")
    assert [row.id for row in decoded.where("not _bad").select("_record.id").collect()] == [1]
    assert decoded.where("_bad").count() == 1


def test_a_session_with_another_time_zone_is_refused(spark: SparkSession) -> None:
    session = spark.newSession()
    for name, value in REQUIRED_CONF.items():
        session.conf.set(name, value)
    Json(FLAT).decode(frame(session, [b"{}"]), "value")
    session.conf.set("spark.sql.session.timeZone", "America/New_York")
    with pytest.raises(UsageError, match="session.timeZone"):
        Json(FLAT).decode(frame(session, [b"{}"]), "value")


def test_bad_records_stop_no_stateful_stream(spark: SparkSession, tmp_path: Path) -> None:
    values = [*GOOD, *BAD, *[b'{"id":%d,"name":"k%d"}' % (i, i % 3) for i in range(300)]]
    frame(spark, values).repartition(4).write.parquet(str(tmp_path / "records"))
    raw = (
        spark.readStream.schema("i long, value binary")
        .option("maxFilesPerTrigger", 1)
        .parquet(str(tmp_path / "records"))
    )
    judged = Json(FLAT).decode(raw, "value").observe("seen", F.count_if("_bad").alias("bad"))
    counted = judged.where("not _bad").select("_record.*").groupBy("name").count()
    counts: dict[str, int] = {}

    def keep(batch: DataFrame, _: int) -> None:
        counts.update({row["name"]: row["count"] for row in batch.collect()})

    query = (
        counted.writeStream.outputMode("update")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .foreachBatch(keep)
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert query.exception() is None
    assert {name: counts[name] for name in ("k0", "k1", "k2")} == {"k0": 100, "k1": 100, "k2": 100}
    assert sum(counts.values()) == 300 + len(GOOD)
    assert sum(progress.observedMetrics["seen"]["bad"] for progress in query.recentProgress) == len(BAD)
