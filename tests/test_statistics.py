"""The buckets of durations, and their quantiles."""

from __future__ import annotations

import random

import pytest

from django_outbox.models.statistics import BOUNDS, bucket, quantile
from tests.cases import cases


def counts(**by_number: int) -> list[int]:
    return [by_number.get(f"b{number}", 0) for number in range(len(BOUNDS) + 1)]


def test_a_time_belongs_to_the_first_bucket_that_reaches_it() -> None:
    assert [bucket(0), bucket(-1), bucket(BOUNDS[0]), bucket(BOUNDS[0] + 1e-9)] == [0, 0, 0, 1]
    assert bucket(BOUNDS[-1]) == len(BOUNDS) - 1
    assert bucket(BOUNDS[-1] + 1) == len(BOUNDS)


@cases(
    ("given", "part", "expected"),
    [
        (counts(), 0.5, None),
        (counts(b0=10), 0.5, BOUNDS[0] / 2),
        (counts(b0=10, b3=10), 0.5, BOUNDS[0]),
        (counts(b0=10, b3=10), 0.75, (BOUNDS[2] + BOUNDS[3]) / 2),
        (counts(b3=4), 1.0, BOUNDS[3]),
        (counts(b16=3), 0.5, BOUNDS[-1]),
    ],
    ids=["none", "half", "edge", "within", "all", "beyond"],
)
def test_a_quantile_lies_within_its_bucket(
    given: list[int], part: float, expected: float | None
) -> None:
    assert quantile(given, part) == (None if expected is None else pytest.approx(expected))


def test_a_quantile_is_as_near_as_its_bucket_is_narrow() -> None:
    chance = random.Random(7)
    times = sorted(chance.lognormvariate(-2, 2) for _ in range(5000))
    given = [0] * (len(BOUNDS) + 1)
    for each in times:
        given[bucket(each)] += 1
    for part in (0.5, 0.95, 0.99):
        found, exact = quantile(given, part), times[int(part * len(times)) - 1]
        assert found is not None
        assert bucket(found) == bucket(exact)
