"""Formats: decoding the bytes of a record into columns. Open `json.py` first, `avro.py` for formats with a registry."""

from streaming_jobs.formats.avro import Avro
from streaming_jobs.formats.cloud_events import CloudEvents
from streaming_jobs.formats.csv import Csv
from streaming_jobs.formats.debezium import Debezium
from streaming_jobs.formats.json import Json
from streaming_jobs.formats.json_schema import JsonSchema
from streaming_jobs.formats.protobuf import Protobuf
from streaming_jobs.formats.raw import Raw, Text

__all__ = ["Avro", "CloudEvents", "Csv", "Debezium", "Json", "JsonSchema", "Protobuf", "Raw", "Text"]
