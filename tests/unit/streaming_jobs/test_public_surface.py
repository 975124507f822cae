"""The names that a stream's author imports, and what their import leaves for later: each is a change for users."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest

import streaming_jobs
from tests.support import ROOT

PUBLIC = [
    "Avro",
    "Between",
    "CloudEvents",
    "ComputedTime",
    "Csv",
    "Debezium",
    "DeltaSource",
    "DeltaTable",
    "EpochMicros",
    "EpochMillis",
    "EpochSeconds",
    "ErrorPolicy",
    "Format",
    "Holds",
    "InSet",
    "Json",
    "JsonSchema",
    "KafkaSink",
    "KafkaTopic",
    "Lookup",
    "Matches",
    "NotNull",
    "PermanentError",
    "PostgresTable",
    "Protobuf",
    "Raw",
    "Record",
    "RecordTimestamp",
    "RecourseError",
    "Settings",
    "Slices",
    "Stream",
    "Text",
    "Topology",
    "TransientError",
    "Truth",
    "Unique",
    "UsageError",
    "archive",
    "interval_join",
    "read_snapshot",
    "salt",
    "stream",
    "truth",
]


_IMPORT = re.compile(
    r"^\s*from ((?:streaming_jobs|quality|reprocessing|orchestration)[\w.]*) import (?:\(([^)]*)\)|(.*))$", re.MULTILINE
)


def test_the_public_names_are_these_and_have_a_docstring_and_no_other_or_module_hides_them() -> None:
    assert streaming_jobs.__all__ == PUBLIC == sorted(PUBLIC, key=str)
    assert all(getattr(streaming_jobs, name).__doc__ for name in PUBLIC)
    assert callable(streaming_jobs.stream)
    assert not hasattr(streaming_jobs, "Nothing")


def test_every_import_in_the_documentation_works() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    imports = {
        (module, name.split(" as ")[0].strip())
        for page in pages
        for module, listed, line in _IMPORT.findall(page.read_text())
        for name in (listed or line).split(",")
        if name.strip().isidentifier() or " as " in name
    }
    assert ("streaming_jobs", "DeltaSource") in imports
    missing = {(m, name) for m, name in imports if not hasattr(importlib.import_module(m), name)}
    assert not missing


def test_importing_the_package_starts_no_spark_and_needs_no_dagster() -> None:
    look = "import sys, streaming_jobs; print(sorted({'pyspark', 'dagster', 'deltalake', 'pandas'} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "not_yet"),
    [
        ("streaming_jobs.session", {"pyarrow", "numpy", "deltalake", "pandas", "streaming_jobs.runtime.query_builder"}),
        ("streaming_jobs.sources.kafka", {"pydantic", "pandas", "deltalake", "structlog"}),
        ("streaming_jobs.platform.processes.fork_server", {"pydantic", "pandas", "deltalake", "pyarrow"}),
        ("streaming_jobs.sources.topics", {"pydantic", "pandas", "deltalake"}),
        ("streaming_jobs.formats.json", {"pydantic", "pandas"}),
    ],
)
def test_what_a_module_leaves_for_later(module: str, not_yet: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {not_yet!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []
