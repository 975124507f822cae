"""JSON records to judge: made for two schemas, then broken in every way that a record can be broken."""

from __future__ import annotations

import json
import random
import re
from datetime import datetime
from functools import cache

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
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
    b'{"id":1,"name":"x","z":' + b"9" * 1001 + b"}",
    b'{"id":1,"name":"x","' + b"k" * 50_001 + b'":1}',
    b'{"id":1,"name":"x","\\u0001":true}',
    b'{"id":1,"name":"x","\\u0001":true,"x":{}}',
    b'{"id":1,"name":"x","\\u0001":null,"\\u0001":true}',
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
    b'{"id":1,"name":"x","\\u0001":true}{"x":{}}',
    b'{"id":1,"name":"x"}{"\\u0001":true}',
    b'{"id":1,"name":"x"},"\\u0001":true}',
    b'{"id":1,"name":"x","\\u0001":true},"x":{}}',
    b'{"id":1,"name":"x","\x01":true}',
)


@cache
def corpus(examples: int) -> tuple[bytes, ...]:
    """Records of `RICH` and what becomes of them when they break, 13 values per example."""
    made: list[bytes] = []

    @seed(20131231)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(record=st.one_of(texts(RICH), texts(RICH, sparse=True)), shuffle=st.integers(0, 2**32))
    def collect(record: str, shuffle: int) -> None:
        chance = random.Random(shuffle)
        made.append(record.encode())
        made.extend(broken(record, chance) for _ in range(12))

    collect()
    return tuple(made)


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
    leaves: dict[type[DataType], st.SearchStrategy[str]] = {
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
    }
    return leaves[type(kind)]


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
