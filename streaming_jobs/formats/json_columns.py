"""The verdict on JSON records in Spark, in native expressions only.

`from_json` alone accepts many records that are wrong. These tests are added, each of them exact:

- **One object and nothing after it.** The last `}` is parsed as `,"\\u0001":true}`: only if the outermost object
  reaches to the end of the value does it contain that field. A record that has the field itself is detected, because
  a control character in a name can only be written as an escape, and escapes get a second test.
- **Text where something else was written.** `from_json` turns a number into text for a STRING field. Text that
  could have been something else (`12`, `true`, `{...`) sends the record through a second parse that keeps types.
- **Times** are read as text, matched against the declared form, then cast; **decimals** as VARIANT, which keeps
  their digits.
- **Wrong types, bad syntax**: Spark's own corrupt-record column. **Required fields**: null tests, at all depths.

The second tests stand in branches that are not evaluated for ordinary records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce

from pyspark.sql import Column, DataFrame
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
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from streaming_jobs.formats.json_reading import (
    END_MARK,
    MAX_DEPTH,
    MAX_NUMBER,
    PLAIN_NUMBER,
)

_PARSED = "__parsed"
_CORRUPT = "__corrupt"
# An option also keeps the optimizer from pruning the schema to the fields in use, which would change verdicts.
_OPTIONS = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": _CORRUPT,
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
    "maxNestingDepth": str(MAX_DEPTH),
    "maxNumLen": str(MAX_NUMBER),
}
# Only text that the cast would accept needs a test: pattern and cast together accept what `json_reading` accepts.
_DAY = "....-..-"
_CLOCK = "..T..:..:[0-9][0-9](?:[.][0-9]{1,9})?"
_TIMES: dict[type[DataType], str] = {
    DateType: _DAY + "[0-9][0-9]",
    TimestampNTZType: _DAY + _CLOCK,
    TimestampType: _DAY + _CLOCK + "(?:Z|[+-][0-9][0-9]:[0-9][0-9])?",
}
_FIRST, _LAST = "0001-01-01T00:00:00", "9999-12-31T23:59:59.999999"
_SPACE = " \t\n\r"
_WHOLE = "-?(?:0|[1-9][0-9]*)"


def add_record(schema: StructType, frame: DataFrame, value: str) -> DataFrame:
    """Add `_record` (struct of `schema`) and `_bad` (never null), decoded from the binary column `value`."""
    wire = StructType(
        [
            *(StructField(field.name, _wire(field.dataType)) for field in schema.fields),
            StructField(END_MARK, BooleanType()),
            StructField(_CORRUPT, StringType()),
        ]
    )
    raw = F.col(value)
    text = raw.cast("string")
    parsed = F.col(_PARSED)
    record = F.struct(*(_value(parsed[field.name], field.dataType).alias(field.name) for field in schema.fields))
    faults = [
        parsed.isNull(),
        parsed[END_MARK].isNull(),
        parsed[_CORRUPT].isNotNull(),
        *(fault for field in schema.fields for fault in _faults(parsed[field.name], field.dataType, field.nullable)),
        ~F.is_valid_utf8(text),
        F.when(F.contains(text, F.lit("\\")), _rarely(text, _bad_escape)),
        *_coerced_text(schema, parsed, text),
    ]
    # Two steps, not one: with one, Spark parses a record once for each field. `greatest` and not `or`: all of it is
    # needed for a good record anyway, and of what is always evaluated Spark evaluates common parts once.
    judged = frame.withColumn(_PARSED, _parsed(raw, wire)).withColumns(
        {"_record": record, "_bad": F.coalesce(F.greatest(*faults), F.lit(False))}
    )
    return judged.drop(_PARSED)


def _wire(kind: DataType) -> DataType:
    """The type that `from_json` parses a value as."""
    if isinstance(kind, StructType):
        return StructType([StructField(field.name, _wire(field.dataType)) for field in kind.fields])
    if isinstance(kind, ArrayType):
        return ArrayType(_wire(kind.elementType))
    if isinstance(kind, DecimalType):
        return VariantType()
    if isinstance(kind, ByteType):  # Spark accepts 128 to 255 as a byte, and wraps them
        return ShortType()
    return StringType() if type(kind) in _TIMES else kind


def _value(parsed: Column, kind: DataType) -> Column:
    """The declared value, from the value that `from_json` returned."""
    if isinstance(kind, StructType) and _converted(kind):
        fields = (_value(parsed[field.name], field.dataType).alias(field.name) for field in kind.fields)
        return F.when(parsed.isNotNull(), F.struct(*fields))
    if isinstance(kind, ArrayType) and _converted(kind):
        element = kind.elementType
        return F.transform(parsed, lambda item: _value(item, element))
    if isinstance(kind, DecimalType):
        return F.try_variant_get(parsed, "$", "string").try_cast(kind)
    return parsed.try_cast(kind) if type(kind) in _TIMES or isinstance(kind, ByteType) else parsed


def _converted(kind: DataType) -> bool:
    return _nullable(kind) != _wire(kind)


def _nullable(kind: DataType) -> DataType:
    if isinstance(kind, StructType):
        return StructType([StructField(field.name, _nullable(field.dataType)) for field in kind.fields])
    return ArrayType(_nullable(kind.elementType)) if isinstance(kind, ArrayType) else kind


def _faults(parsed: Column, kind: DataType, nullable: bool) -> list[Column]:
    """The tests for faults of a value, each true (a fault), false or null (no fault)."""
    faults = [] if nullable else [parsed.isNull()]
    if isinstance(kind, StructType):
        inner = [fault for f in kind.fields for fault in _faults(parsed[f.name], f.dataType, f.nullable)]
        faults += [parsed.isNotNull() & _any(inner)] if inner else []
    elif isinstance(kind, ArrayType):
        element, contains_null = kind.elementType, kind.containsNull
        if _faults(F.lit(None), element, contains_null):
            faults.append(F.exists(parsed, lambda item: _any(_faults(item, element, contains_null))))
    elif type(kind) in _TIMES:
        cast = _value(parsed, kind)
        usual = parsed.rlike(rf"^[12]{_TIMES[type(kind)][1:]}\z")
        # Always evaluated, so that it is the same cast as that of the value.
        faults.append(cast.isNull() & parsed.isNotNull())
        faults.append(F.when(~usual, _rarely(parsed, lambda item: _wrong_time(item, kind))))
    elif isinstance(kind, DoubleType | FloatType):
        faults.append(F.abs(parsed) == float("inf"))  # the literal is refused before: this is an overflow
    elif isinstance(kind, ByteType):
        faults.append(~parsed.between(-128, 127))
    elif isinstance(kind, DecimalType):
        faults.append(_not_decimal(parsed, kind))
    return faults


def _wrong_time(text: Column, kind: DataType) -> Column:
    """True for text that is not of the declared form, or whose year is not among 1 to 9999 in UTC."""
    cast = _value(text, kind)
    first, last = (F.lit(limit[:10] if isinstance(kind, DateType) else limit).cast(kind) for limit in (_FIRST, _LAST))
    return ~F.coalesce((cast >= first) & (cast <= last), F.lit(False)) | ~_is_all(text, _TIMES[type(kind)])


def _not_decimal(variant: Column, kind: DecimalType) -> Column:
    """True for anything but digits that the type holds exactly."""
    digits = F.try_variant_get(variant, "$", "string")
    whole = kind.precision - kind.scale
    fits = f"-?0*[0-9]{{0,{whole}}}(?:[.][0-9]{{0,{kind.scale}}}0*)?"
    number = F.schema_of_variant(variant).rlike("^(?:BIGINT|DECIMAL)")
    return ~_empty(variant) & ~(number & _is_all(digits, PLAIN_NUMBER) & _is_all(digits, fits))


def _empty(variant: Column) -> Column:
    return variant.isNull() | F.is_variant_null(variant)


def _parsed(raw: Column, wire: StructType) -> Column:
    """The record with the end mark in it; without the mark where the value is not one object."""
    text = raw.cast("string")
    body = F.substring(raw, F.lit(1), F.octet_length(raw) - 1).cast("string")
    mark = F.lit('"\\u0001":true}')
    # The rare values: blanks after the object, an empty object, no object at all.
    trimmed = F.rtrim(text, F.lit(_SPACE))
    shorter = F.rtrim(F.substr(trimmed, F.lit(1), F.char_length(trimmed) - 1), F.lit(_SPACE))
    comma = F.when(F.endswith(shorter, F.lit("{")), F.lit("")).otherwise(F.lit(","))
    rare = F.when(F.endswith(trimmed, F.lit("}")), F.concat(shorter, comma, mark)).otherwise(trimmed)
    # array_join is among the few functions that Spark holds for expensive. Standing here, where it is rarely
    # evaluated, it keeps filters from moving below the parse, which would then run again for each of them.
    rare = F.array_join(F.array(rare), "")
    ordinary = F.endswith(text, F.lit("}")) & F.contains(text, F.lit('"'))
    return F.when(ordinary, F.from_json(F.concat(body, F.lit(","), mark), wire, _OPTIONS)).otherwise(
        F.from_json(rare, wire, _OPTIONS)
    )


def _bad_escape(text: Column) -> Column:
    r"""True for an escape without its second half (`\ud83d` alone; Spark would put `?`), or the end mark itself."""
    surrogate = r"\\u[dD][89a-fA-F]"
    pair = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    without_backslashes = F.regexp_replace(text, r"\\\\", " ")
    lone = F.regexp_replace(without_backslashes, pair, " ").rlike(surrogate)
    mark_field = F.from_json(text, StructType([StructField(END_MARK, VariantType())]), _OPTIONS)[END_MARK]
    marked = F.contains(text, F.lit("\\u0001")) & ~_empty(mark_field)
    return F.when(text.rlike(surrogate), lone).otherwise(F.lit(False)) | marked


def _coerced_text(schema: StructType, parsed: Column, text: Column) -> list[Column]:
    """For a schema with text: true where the record has something else than a string there."""
    typed = _typed(schema)
    if not isinstance(typed, StructType):
        return []
    suspect = _suspect_text(schema, parsed, text)
    # `exists` binds the second parse to a name, so that it runs once for all fields.
    parsed_again = F.array(F.from_json(text, typed.add(_CORRUPT, StringType()), _OPTIONS))
    coerced = F.exists(
        parsed_again,
        lambda again: F.coalesce(again[_CORRUPT].isNotNull() | _in_text(schema, again, _is_other), F.lit(False)),
    )
    return [F.when(suspect, coerced)]


def _typed(kind: DataType) -> DataType | None:
    """The parts of a type that hold text, text as VARIANT; None where there is no text."""
    if isinstance(kind, StructType):
        fields = [StructField(f.name, inner) for f in kind.fields if (inner := _typed(f.dataType)) is not None]
        return StructType(fields) if fields else None
    if isinstance(kind, ArrayType):
        inner = _typed(kind.elementType)
        return None if inner is None else ArrayType(inner)
    return VariantType() if isinstance(kind, StringType) else None


def _in_text(kind: DataType, parsed: Column, test: Callable[[Column], Column]) -> Column:
    """True if `test` holds for any text in a value."""
    if isinstance(kind, StructType):
        return _any(
            _in_text(field.dataType, parsed[field.name], test) for field in kind.fields if _typed(field.dataType)
        )
    if isinstance(kind, ArrayType):
        element = kind.elementType
        return F.exists(parsed, lambda item: _in_text(element, item, test))
    return test(parsed)


def _suspect_text(schema: StructType, parsed: Column, text: Column) -> Column:
    """True where text of the record could have been something else.

    Most text passes with a few comparisons. The rest of the test stands once for all text that is in no array: a plan
    with one for each field is slow to make.
    """
    plain, tests = [], []
    for field in schema.fields:
        if isinstance(field.dataType, StringType):
            plain.append(parsed[field.name])
        elif _typed(field.dataType):
            tests.append(_in_text(field.dataType, parsed[field.name], lambda item: _could_be_other(item, text)))
    if plain:
        look = _any(_deserves_a_look(item) for item in plain)
        tests.append(F.when(look, F.exists(F.array(*plain), lambda item: _could_be_other(item, text))))
    return _any(tests)


def _deserves_a_look(text: Column) -> Column:
    """False for text that begins with a letter, and is not the name of a boolean."""
    return (text < "A") | text.startswith("[") | (text >= "{") | text.isin("true", "false")


def _rarely(value: Column, test: Callable[[Column], Column]) -> Column:
    """`test` of a value in a lambda, for tests that are evaluated rarely: Spark generates no code for a lambda.

    Code for all the rare cases would be several times that of the ordinary one, made anew in each task.
    """
    return F.exists(F.array(value), test)


def _could_be_other(item: Column, text: Column) -> Column:
    """True for what Spark makes of a number, a boolean, an object or an array, and for a few strings."""
    whole = _is_all(item, _WHOLE) & _stands_bare(item, text)
    number = whole | (_is_all(item, _WHOLE + "(?:[.][0-9]+)?(?:E-?[0-9]+)?") & item.rlike("[.E]"))
    infinite = item.between('"', '"J')
    boolean = item.isin("true", "false") & _stands_bare(item, text)
    structure = item.between("[", "[\x7f") | item.between("{", "{\x7f")
    return F.when(item < "A", number | infinite).when(item >= "[", structure | boolean)


def _stands_bare(item: Column, text: Column) -> Column:
    """False where the record has these characters between quotes only: then they are no number or literal."""
    return F.contains(F.replace(text, F.concat(F.lit('"'), item, F.lit('"'))), item)


def _is_other(typed: Column) -> Column:
    return ~_empty(typed) & (F.schema_of_variant(typed) != "STRING")


def _is_all(text: Column, pattern: str) -> Column:
    return text.rlike(rf"^(?:{pattern})\z")


def _any(tests: Iterable[Column]) -> Column:
    return reduce(lambda left, right: left | right, tests)
