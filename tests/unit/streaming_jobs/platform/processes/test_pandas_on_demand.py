"""PyArrow does without pandas, until somebody imports it; each case in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

_BEGIN = """
import sys, threading
import pyarrow as pa
from streaming_jobs.platform.processes.pandas_on_demand import pandas_on_demand
pandas_on_demand()
pandas_on_demand()
pa.array([1.5])
assert "pandas" not in sys.modules
"""
_FULL = """
series = pd.Series([1.0, float("nan")])
assert pa.array(series).null_count == 1, "a pandas object is recognised: NaN is null"
assert not [f for f in sys.meta_path if type(f).__module__.startswith("streaming_jobs")]
"""


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN + code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import pandas as pd",
        "import importlib.util; assert importlib.util.find_spec('pandas'); import pandas as pd",
        "frame = pa.table({'a': [1]}).to_pandas(); pd = sys.modules['pandas']; assert isinstance(frame, pd.DataFrame)",
        "t = threading.Thread(target=__import__, args=['pandas']); t.start(); t.join(); pd = sys.modules['pandas']",
        "import pandas.testing, pandas as pd",
    ],
)
def test_pandas_is_whole_as_soon_as_it_is_imported(code: str) -> None:
    run(f"{code}\n{_FULL}")


_WORKERS = """
import os
import pyspark.worker
from streaming_jobs.platform.processes.pandas_on_demand import pandas_after_a_failure

def main(code, fails):
    exec(code)
    if fails:
        sys.exit(-1)

pyspark.worker.main = main
forks = os.fork
pandas_after_a_failure()

def worker(code="", fails=False):
    pid = os.fork()
    if pid == 0:
        had = "pandas" in sys.modules
        assert os.fork is forks, "a function that forks is left alone"
        try:
            pyspark.worker.main(code, fails)
        except SystemExit:
            pass
        os._exit(had)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def test_workers_that_are_forked_after_one_with_pandas_has_failed_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JE_ARROW_MALLOC_CONF", "background_thread:false")  # as in the fork server
    run(f"""{_WORKERS}
assert [worker("import pandas"), worker(fails=True), worker()] == [0, 0, 0], "none has failed that had it"
assert [worker("import pandas", fails=True), worker("import pandas")] == [0, 1]
assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
""")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    run(f"{_WORKERS}\nassert [worker('import pandas', fails=True), worker()] == [0, 0], 'it would have threads'")


def test_pyarrow_imports_pandas_without_it_and_nothing_changes_where_pandas_is_imported_already() -> None:
    code = "import sys, pyarrow as pa; pa.array([1.5]); assert 'pandas' in sys.modules, 'the module is not needed'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    run_first = "import pandas as pd, sys, pyarrow as pa\n"
    call = "from streaming_jobs.platform.processes.pandas_on_demand import pandas_on_demand; pandas_on_demand()\n"
    subprocess.run([sys.executable, "-c", run_first + call + _FULL], check=True, timeout=60)
