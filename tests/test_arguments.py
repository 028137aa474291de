"""What a person types after an option: durations, instants, counts."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from hypothesis import given
from hypothesis import strategies as st

from django_outbox.management.arguments import (
    duration,
    instant,
    non_negative_int,
    positive_duration,
    positive_int,
    retention,
    share,
)
from django_outbox.management.command import cell, table
from tests.cases import cases

DAY = 86_400.0


@cases(
    ("text", "seconds"),
    [
        ("7d", 7 * DAY),
        ("90m", 5400),
        ("1h30m", 5400),
        ("45s", 45),
        ("2w", 14 * DAY),
        ("1w2d3h4m5s", 9 * DAY + 3 * 3600 + 245),
        ("1.5h", 5400),
        ("0.2s", 0.2),
        ("300", 300),
        ("0.5", 0.5),
        ("0", 0),
        ("0s", 0),
        (" 7D ", 7 * DAY),
        ("1H30M", 5400),
    ],
    ids=str,
)
def test_a_duration(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@cases(
    "text",
    [
        "",
        " ",
        "7 days",
        "1h 30m",
        *"d 7x -1 -1h 1h-5m 30m1h 1h1h h30 1,5h inf nan 1e3 ٣ 0x10 .".split(),
    ],
    ids=repr,
)
def test_what_is_no_duration_says_what_is_expected(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="7d, 90m, 1h30m, 45s"):
        duration(text)


@cases("text", ["101w200000d", "99999999999999999999", "36526d"])
def test_a_duration_ends_at_a_century(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="century"):
        duration(text)


@given(st.integers(0, 99), st.integers(0, 23), st.integers(0, 59), st.integers(1, 59))
def test_a_duration_is_the_sum_of_its_parts(d: int, h: int, m: int, s: int) -> None:
    assert (
        duration(f"{d}d{h}h{m}m{s}s")
        == timedelta(days=d, hours=h, minutes=m, seconds=s).total_seconds()
    )


PARSERS: list[Callable[[str], object]] = [
    duration,
    positive_duration,
    retention,
    instant,
    positive_int,
    non_negative_int,
    share,
]


@given(st.text(max_size=20))
def test_any_text_is_a_duration_or_an_argument_error(text: str) -> None:
    for parse in PARSERS:
        try:
            parse(text)
        except ArgumentTypeError as error:
            assert repr(text) in str(error)  # noqa: PT017 - most texts raise nothing else


def test_a_pause_is_above_zero() -> None:
    assert positive_duration("1s") == 1
    with pytest.raises(ArgumentTypeError, match="above zero"):
        positive_duration("0s")


@cases(
    ("text", "expected"),
    [
        ("2026-03-01", datetime(2026, 2, 28, 18, 15, tzinfo=timezone.utc)),
        ("2026-03-01T08:30", datetime(2026, 3, 1, 2, 45, tzinfo=timezone.utc)),
        ("2026-03-01 08:30:15", datetime(2026, 3, 1, 2, 45, 15, tzinfo=timezone.utc)),
        ("2026-03-01T08:30Z", datetime(2026, 3, 1, 8, 30, tzinfo=timezone.utc)),
        ("2026-03-01T08:30+02:00", datetime(2026, 3, 1, 6, 30, tzinfo=timezone.utc)),
        ("2h", timedelta(hours=2)),
        ("7d", timedelta(days=7)),
        ("60s", timedelta(minutes=1)),
    ],
    ids=str,
)
def test_an_instant_is_a_time_or_how_long_ago_it_was(text: str, expected: Any) -> None:
    """The suite's TIME_ZONE is Asia/Kathmandu, +05:45."""
    assert instant(text) == expected


@cases("text", ["yesterday", "2026-13-01", "2026-02-30T10:00", "", "1.3.2026"])
def test_what_is_no_instant_is_told(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="not an instant"):
        instant(text)


@cases(
    ("parse", "text", "expected"),
    [
        (positive_int, "0", "at least 1"),
        (positive_int, "-1", "at least 1"),
        (positive_int, "1.5", "at least 1"),
        (positive_int, "", "at least 1"),
        (positive_int, "x", "at least 1"),
        (non_negative_int, "-1", "at least 0"),
        (non_negative_int, "², ", "at least 0"),
    ],
    ids=["zero", "negative", "half", "nothing", "text", "negative limit", "no digit"],
)
def test_what_is_no_count_is_told(parse: Callable[[str], int], text: str, expected: str) -> None:
    with pytest.raises(ArgumentTypeError, match=expected):
        parse(text)


@cases(("text", "seconds"), [("1d", 86_400.0), ("90m", 5400.0), ("0", 0.0)])
def test_a_retention_has_a_unit(text: str, seconds: float) -> None:
    assert retention(text) == seconds


@cases("text", ["1", "0.5", " 30 "])
def test_a_retention_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="has no unit"):
        retention(text)
    with pytest.raises(ArgumentTypeError, match="not an instant"):
        instant(text)


@cases(("text", "expected"), [("10", 0.1), ("0.5%", 0.005), ("100 %", 1.0)])
def test_a_share_is_given_in_percent(text: str, expected: float) -> None:
    assert share(text) == pytest.approx(expected)


@cases("text", ["101", "-1", "", "a tenth"])
def test_what_is_no_percentage_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="not a percentage"):
        share(text)


def test_counts_and_limits() -> None:
    assert (positive_int("1"), positive_int("500"), non_negative_int("0")) == (1, 500, 0)


def test_a_table_has_columns_as_wide_as_their_widest_cell() -> None:
    rows = [{"a": "long", "the_b": "x"}, {"a": None, "the_b": "longer\n y"}]
    assert [*table(rows)] == ["A     THE B", "long  x", "-     longer y"]
    assert [*table(rows, ("the_b",))] == ["THE B", "x", "longer y"]
    assert [*table([])] == []


def test_cells_are_for_people() -> None:
    at = datetime(2026, 3, 1, 8, 30, tzinfo=timezone.utc)
    values = [at, True, False, 1.6, ["a", 2], {"a": 2}, "", 0, None]
    told = ["2026-03-01 08:30:00+00:00", "yes", "-", "2 s", "a, 2", "a 2", "-", "0", "-"]
    assert [*map(cell, values)] == told


def test_a_command_tells_what_it_could_not_read() -> None:
    with pytest.raises(CommandError, match=r"--max-lag.*'7 days' is not a duration; expected"):
        call_command("outbox_status", "--max-lag=7 days")
