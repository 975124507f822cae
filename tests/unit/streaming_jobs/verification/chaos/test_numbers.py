"""Arithmetic on a key's name says the same as adding the numbers up."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise

import pytest

from streaming_jobs.verification.chaos.numbers import WINDOW, Interval, waves


def fed(seed: int) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for wave in islice(waves(seed), 3):
        for key, number in wave:
            numbers.setdefault(key, []).append(number)
    return numbers


@pytest.mark.parametrize("seed", range(20))
def test_a_key_gets_the_numbers_that_it_names_and_its_figures_are_theirs(seed: int) -> None:
    for key, numbers in fed(seed).items():
        interval = Interval.of(key)
        assert interval.key == key and len(set(numbers)) == len(numbers)
        assert sorted(numbers) == [*range(interval.low, interval.high + 1)]
        low, high, total, count = min(numbers), max(numbers), sum(numbers), len(numbers)
        assert interval.figures == {"minimum": low, "maximum": high, "total": total, "count": count}
        assert interval.differences == {"difference": high - low, "average": total / count, "count": count}
        assert interval.windows == Counter(number // WINDOW * WINDOW for number in numbers)


def test_numbers_come_in_random_order_among_those_of_other_keys_and_again_with_the_same_seed() -> None:
    wave = next(waves(1))
    keys = [key for key, _ in wave]
    neighbours = sum(one == other for one, other in pairwise(keys))
    assert neighbours < len(keys) / 10
    assert any(numbers != sorted(numbers) for numbers in fed(1).values())
    assert fed(1) == fed(1) != fed(2)


def test_a_key_that_names_no_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="names no interval"):
        Interval.of("7:1-2")
