"""A process without a file of its own imports Great Expectations, whose import of PySpark would end it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from quality import Suite
from quality.expectations import built

def orders():
    import great_expectations.expectations as gxe
    return [gxe.ExpectColumnValuesToNotBeNull(column="id")]

assert sys.modules["__main__"].__spec__ is None and not hasattr(sys.modules["__main__"], "__file__")
print([each.name for each in built(Suite("orders", "orders", orders))])
assert not hasattr(sys.modules["__main__"], "__file__")
"""
CONNECT = """
try:
    import pyspark.sql.connect.session
except ImportError:  # a package that Connect needs and nobody else
    pass
"""
GREAT_EXPECTATIONS = "import great_expectations.expectations as gxe"


def python(program: str, *path: str) -> str:
    """What `python -c` prints."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join([".", *path])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-1000:]
    return done.stdout


def test_a_suite_is_built_in_a_process_without_a_file() -> None:
    assert python(PROGRAM).strip() == "['id_not_null']"


@pytest.mark.parametrize("module", [CONNECT, pytest.param(GREAT_EXPECTATIONS, marks=pytest.mark.long)])
def test_a_module_of_flows_that_imports_pysparks_connect_client_is_loaded_there(tmp_path: Path, module: str) -> None:
    (tmp_path / "strict.py").write_text(module)
    program = (
        "from streaming_jobs.catalog.topology import modules_of; "
        "print([each.__name__ for each in modules_of('strict')])"
    )
    assert python(program, str(tmp_path)).strip() == "['strict']"
