"""PySpark's utilities for tests, which PySpark uses itself: `lit` and each call of Java ask them if NumPy is there.

They answer by importing all that PySpark's tests need, as far as it is installed: pandas, PyYAML, Jinja and more, a
third of a second and 36 MB in each driver. With `answer_first` that question is answered without them; they are loaded
when somebody asks them something else, such as `assertDataFrameEqual`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_NAME = "pyspark.testing.utils"


class _Utilities(ModuleType):
    """Stands for the module until it is loaded."""

    have_numpy = True  # a dependency of ours

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # those of a package, which it is not
            raise AttributeError(name)
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)


def answer_first() -> None:
    """Answer the question about NumPy in their place, unless they are loaded already."""
    sys.modules.setdefault(_NAME, _Utilities(_NAME))
