"""What is imported where a tenth of a second counts: before the JVM is started, and in each Python process of it."""

from __future__ import annotations

import subprocess
import sys

import pytest


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
