"""What every run of pytest loads where the package is installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib

from tests.support import ROOT

HEAVY = "numpy", "pandas", "pyarrow", "pydantic", "pyspark", "structlog", "deltalake", "confluent_kafka"


def test_the_plugin_that_the_wheel_names_imports_nothing_heavy() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [module] = project["entry-points"]["pytest11"].values()
    code = f"import sys, {module} as plugin; plugin.stream_test; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
