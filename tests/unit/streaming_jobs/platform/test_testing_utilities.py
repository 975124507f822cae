"""PySpark's utilities for tests are loaded for who wants them, and not for a question that they answer too."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

ASKING = """
import sys
from streaming_jobs.platform import spark
{first}
spark.answer_first()
from pyspark.sql import functions as F
from pyspark.testing.utils import have_numpy
assert have_numpy
print("pandas" in sys.modules)
{wants}
assert assertDataFrameEqual.__module__ == "pyspark.testing.utils"
from pyspark.testing.utils import have_numpy, have_pandas
assert have_numpy and have_pandas
spark.answer_first()
print(type(sys.modules["pyspark.testing.utils"]).__name__)
"""


def asked(wants: str, first: str = "") -> list[str]:
    code = ASKING.format(wants=wants, first=first)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


WANTS = [
    "from pyspark.testing.utils import assertDataFrameEqual",
    "import pyspark.testing as it\nassertDataFrameEqual = it.assertDataFrameEqual",
    "import pyspark.testing.pandasutils\nfrom pyspark.testing.utils import assertDataFrameEqual",
]
FURTHER = [
    "from pyspark.testing import assertDataFrameEqual",
    "import pyspark.testing.utils as it\nassertDataFrameEqual = it.assertDataFrameEqual",
    "from pyspark.testing import utils as it\nassertDataFrameEqual = it.assertDataFrameEqual",
]


@pytest.mark.parametrize("wants", [*WANTS, *(pytest.param(each, marks=pytest.mark.long) for each in FURTHER)])
def test_they_are_loaded_when_they_are_wanted(wants: str) -> None:
    before, *rest = asked(wants)
    assert before == "False" and ("pandasutils" in wants or rest == ["module"])


def test_they_stay_where_they_are_loaded_already() -> None:
    assert asked("from pyspark.testing import assertDataFrameEqual", "import pyspark.testing") == ["True", "module"]
