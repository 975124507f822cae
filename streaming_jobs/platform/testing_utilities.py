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

_PACKAGE, _UTILITIES = "pyspark.testing", "pyspark.testing.utils"


class _Unloaded(ModuleType):
    """Stands for a module until something is asked of it that it has not been given."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and (name != "__path__" or self.__name__ != _PACKAGE):
            raise AttributeError(name)  # of a package, which it is not
        for each in (_UTILITIES, _PACKAGE):
            if isinstance(sys.modules.get(each), _Unloaded):
                del sys.modules[each]
        importlib.import_module(_PACKAGE)  # and with it the utilities
        return getattr(importlib.import_module(self.__name__), name)


def answer_first() -> None:
    """Answer the question about NumPy in their place, unless they are loaded already."""
    if _PACKAGE in sys.modules or _UTILITIES in sys.modules:
        return
    pyspark = importlib.import_module("pyspark")
    package, utilities = _Unloaded(_PACKAGE), _Unloaded(_UTILITIES)
    utilities.have_numpy = True  # type: ignore[attr-defined]  # a dependency of ours
    package.utils = utilities  # type: ignore[attr-defined]
    pyspark.testing = package  # type: ignore[attr-defined]
    sys.modules.update({_PACKAGE: package, _UTILITIES: utilities})
