"""Median, MAD, Kolmogorov-Smirnov and the stability index, against their definitions and on awkward samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quality.table_checks.statistics import (
    index_by_chance,
    kolmogorov_smirnov,
    ks_by_chance,
    quantile_counts,
    stability_index,
    usual,
)

pytestmark = pytest.mark.slow

NUMBERS = st.lists(st.integers(-1000, 1000).map(float), min_size=1, max_size=60)
COUNTS = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), min_size=1, max_size=12)


@given(NUMBERS, st.integers(-1000, 1000), st.integers(1, 50))
def test_the_score_does_not_depend_on_zero_and_unit(numbers: list[float], shift: int, unit: int) -> None:
    moved = usual([number * unit + shift for number in numbers])
    for number in (*numbers, 5000.0):
        assert moved.score(number * unit + shift) == pytest.approx(usual(numbers).score(number), rel=1e-6, abs=1e-9)


@given(st.lists(st.floats(90, 110), min_size=9, max_size=40), st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=4))
def test_a_few_wild_numbers_do_not_move_the_median_out_of_the_others(numbers: list[float], wild: list[float]) -> None:
    assert 90 <= usual([*numbers, *wild]).median <= 110


def test_the_mad_is_that_of_the_definition() -> None:
    known = usual([1, 2, 3, 4, 100])
    assert (known.median, known.scale) == (3, pytest.approx(1.4826))
    assert known.score(100) == pytest.approx(97 / 1.4826)


def test_half_equal_numbers_leave_the_mean_distance() -> None:
    assert usual([5, 5, 5, 5, 10]).scale == pytest.approx(1.2533)


def test_equal_numbers_make_every_other_number_unusual_unless_it_is_near() -> None:
    known = usual([100.0] * 9)
    assert known.score(100) == 0
    assert known.score(101, tolerance=0.02) == 0
    assert known.score(101) == math.inf


@given(NUMBERS, NUMBERS)
def test_the_distance_is_that_of_the_definition(old: list[float], new: list[float]) -> None:
    slow = max(
        abs(sum(x <= place for x in old) / len(old) - sum(x <= place for x in new) / len(new)) for place in [*old, *new]
    )
    assert kolmogorov_smirnov(np.array(old), np.array(new)) == pytest.approx(slow)


@given(NUMBERS)
def test_a_sample_has_no_distance_from_itself(old: list[float]) -> None:
    sample = np.array(old)
    assert kolmogorov_smirnov(sample, sample) == 0
    counts = quantile_counts(sample, sample, 10)
    assert stability_index(*counts) == 0


@given(NUMBERS, NUMBERS, st.integers(2, 20))
def test_every_value_is_in_one_bin(old: list[float], new: list[float], bins: int) -> None:
    before, after = quantile_counts(np.array(old), np.array(new), bins)
    assert (sum(before), sum(after)) == (len(old), len(new))


@given(COUNTS)
def test_the_index_is_symmetric_and_never_negative(counts: list[tuple[int, int]]) -> None:
    old, new = [a for a, _ in counts], [b for _, b in counts]
    assume(sum(old) and sum(new))
    assert stability_index(old, new) >= 0
    assert stability_index(old, new) == pytest.approx(stability_index(new, old))


def test_the_index_is_that_of_the_definition() -> None:
    expected = (0.3 - 0.5) * math.log(0.3 / 0.5) + (0.7 - 0.5) * math.log(0.7 / 0.5)
    assert stability_index([500_000, 500_000], [300_000, 700_000]) == pytest.approx(expected, rel=1e-4)


def test_a_value_that_most_rows_have_is_a_bin_alone() -> None:
    """Else a value that moves from 0 to just below it would not be seen."""
    old = np.array([0.0] * 80 + list(range(1, 21)))
    moved = np.array([-1.0] * 80 + list(range(1, 21)))
    assert stability_index(*quantile_counts(old, moved, 10)) > 1


def test_chance_exceeds_the_bounds_about_once_in_a_thousand_cases() -> None:
    random, cases = np.random.default_rng(7), 2000
    beyond = {"ks": 0, "psi": 0}
    for _ in range(cases):
        old, new = random.normal(size=400), random.normal(size=300)
        beyond["ks"] += kolmogorov_smirnov(old, new) > ks_by_chance(400, 300)
        counts = quantile_counts(old, new, 10)
        beyond["psi"] += stability_index(*counts) > index_by_chance(400, 300, len(counts[0]))
    assert all(count <= cases * 0.004 for count in beyond.values()), beyond
