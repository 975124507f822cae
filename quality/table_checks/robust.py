"""Whether a number is usual among others: median and MAD, which a few wild numbers do not move. Pure.

The modified z-score of B. Iglewicz and D. Hoaglin, "How to Detect and Handle Outliers" (ASQC, 1993), section 3.3:
0.6745 * (x - median) / MAD, where MAD is the median of the distances from the median; they call scores above 3.5
outliers. 1 / 0.6745 makes MAD the standard deviation of normally distributed numbers. If half of the numbers are equal,
MAD is zero; then the mean distance takes its place, with the factor 1 / 1.2533 (IBM SPSS, "Modified z score").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MAD = 1.4826
_MEAN = 1.2533


@dataclass(frozen=True)
class Usual:
    """The middle of some numbers, and the standard deviation that they would have without wild ones."""

    median: float
    scale: float
    points: int

    def score(self, number: float, tolerance: float = 0.0) -> float:
        """The number's distance from the median in standard deviations; infinite if all numbers are equal.

        A number within the part `tolerance` of the median is not unusual, however equal the others are: 0.
        """
        distance = abs(number - self.median)
        if distance <= tolerance * abs(self.median):
            return 0.0
        return distance / self.scale if self.scale else math.inf


def usual(numbers: Sequence[float]) -> Usual:
    """The middle and the spread of numbers; there has to be at least one, and all have to be finite."""
    values = np.asarray(numbers, dtype=np.float64)
    median = float(np.median(values))
    distances = np.abs(values - median)
    scale = _MAD * float(np.median(distances)) or _MEAN * float(np.mean(distances))
    return Usual(median, scale, len(values))
