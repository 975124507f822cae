"""The statistics of the checks: whether a number is usual, and how far two samples of a column are apart. NumPy only.

The modified z-score of B. Iglewicz and D. Hoaglin, "How to Detect and Handle Outliers" (ASQC, 1993), section 3.3:
0.6745 * (x - median) / MAD, where MAD is the median of the distances from the median; they call scores above 3.5
outliers. 1 / 0.6745 makes MAD the standard deviation of normally distributed numbers. If half of the numbers are equal,
MAD is zero; then the mean distance takes its place, with the factor 1 / 1.2533 (IBM SPSS, "Modified z score").

Kolmogorov-Smirnov, for two samples: the greatest distance between the two empirical distribution functions (N. Smirnov,
"Table for Estimating the Goodness of Fit of Empirical Distributions", Ann. Math. Statist. 19, 1948). By chance alone it
is above c * sqrt((n + m) / (n * m)) once in a thousand cases, with c = sqrt(-ln(0.001 / 2) / 2) = 1.949.

Population stability index: sum over bins of (new - old) * ln(new / old), of the shares of rows (S. Kullback and
R. Leibler's J-divergence, Ann. Math. Statist. 22, 1951; the name is from N. Siddiqi, "Credit Risk Scorecards", 2006,
who calls 0.1 a small and 0.25 a large shift). Half a row is added to every bin, so that an empty one has a logarithm.
For equal distributions the index is about (1 / n + 1 / m) times a chi-square of bins - 1 (B. Yurdakul, "Statistical
Properties of Population Stability Index", 2018); the bound of one case in a thousand is that of E. Wilson and
M. Hilferty's approximation (PNAS 17, 1931).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

_MAD, _MEAN = 1.4826, 1.2533
_HALF = 0.5
_C = math.sqrt(-math.log(0.001 / 2) / 2)
_Z = 3.0902
"""The quantile of the normal distribution for one case in a thousand."""


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


def kolmogorov_smirnov(old: Numbers, new: Numbers) -> float:
    """The greatest distance between the distribution functions, 0 to 1; neither sample is empty or has a NaN."""
    old, new = np.sort(old), np.sort(new)
    places = np.concatenate((old, new))
    distances = np.searchsorted(old, places, "right") / len(old) - np.searchsorted(new, places, "right") / len(new)
    return float(np.max(np.abs(distances)))


def ks_by_chance(old: int, new: int) -> float:
    """The distance that samples of these sizes from one distribution exceed once in a thousand cases."""
    return _C * math.sqrt((old + new) / (old * new))


def quantile_counts(old: Numbers, new: Numbers, bins: int) -> tuple[list[int], list[int]]:
    """The numbers of both samples per bin; the bins' borders are quantiles of the old one, equal ones taken once."""
    borders, times = np.unique(np.quantile(old, np.linspace(0, 1, bins + 1)[1:-1], method="lower"), return_counts=True)
    # A border belongs to the bin below it; a value that is several borders, since many rows have it, is a bin alone.
    borders = np.unique(np.concatenate((borders, np.nextafter(borders[times > 1], -np.inf))))
    counts = [np.bincount(np.searchsorted(borders, each, "left"), minlength=len(borders) + 1) for each in (old, new)]
    kept = (counts[0] > 0) | (counts[1] > 0)
    return counts[0][kept].tolist(), counts[1][kept].tolist()


def stability_index(old: Sequence[int], new: Sequence[int]) -> float:
    """The population stability index of counts per bin, 0 for equal shares."""
    bins = len(old)
    shares = [(np.asarray(each, dtype=np.float64) + _HALF) / (sum(each) + _HALF * bins) for each in (old, new)]
    return float(np.sum((shares[1] - shares[0]) * np.log(shares[1] / shares[0])))


def index_by_chance(old: int, new: int, bins: int) -> float:
    """The index that samples of these sizes from one distribution exceed about once in a thousand cases."""
    if bins < 2:
        return 0.0
    degrees, part = bins - 1, 2 / (9 * (bins - 1))
    return float((1 / old + 1 / new) * degrees * (1 - part + _Z * math.sqrt(part)) ** 3)
