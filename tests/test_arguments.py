"""What a person types after an option: durations, instants, counts."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from hypothesis import given
from hypothesis import strategies as st

from django_outbox.inspection.counts import AtLeast
from django_outbox.management.arguments import (
    duration,
    instant,
    non_negative_int,
    positive_duration,
    positive_int,
    retention,
    share,
)
from django_outbox.management.command import as_json, cell, table
from tests.cases import cases

DAY = 86_400.0


UTC = timezone.utc


@cases(
    ("parse", "text", "expected"),
    [
        (duration, "7d", 7 * DAY),
        (duration, "90m", 5400),
        (duration, "1h30m", 5400),
        (duration, "45s", 45),
        (duration, "2w", 14 * DAY),
        (duration, "1w2d3h4m5s", 9 * DAY + 3 * 3600 + 245),
        (duration, "1.5h", 5400),
        (duration, "0.2s", 0.2),
        (duration, "300", 300),
        (duration, "0.5", 0.5),
        (duration, "0", 0),
        (duration, "0s", 0),
        (duration, " 7D ", 7 * DAY),
        (duration, "1H30M", 5400),
        (positive_duration, "1s", 1),
        # The suite's TIME_ZONE is Asia/Kathmandu, +05:45.
        (instant, "2026-03-01", datetime(2026, 2, 28, 18, 15, tzinfo=UTC)),
        (instant, "2026-03-01T08:30", datetime(2026, 3, 1, 2, 45, tzinfo=UTC)),
        (instant, "2026-03-01 08:30:15", datetime(2026, 3, 1, 2, 45, 15, tzinfo=UTC)),
        (instant, "2026-03-01T08:30Z", datetime(2026, 3, 1, 8, 30, tzinfo=UTC)),
        (instant, "2026-03-01T08:30+02:00", datetime(2026, 3, 1, 6, 30, tzinfo=UTC)),
        (instant, "2h", timedelta(hours=2)),  # ago
        (instant, "7d", timedelta(days=7)),
        (instant, "60s", timedelta(minutes=1)),
        (retention, "1d", DAY),
        (retention, "90m", 5400),
        (retention, "0", 0),
        (share, "10", 0.1),
        (share, "0.5%", 0.005),
        (share, "100 %", 1),
        (positive_int, "1", 1),
        (positive_int, "500", 500),
        (non_negative_int, "0", 0),
    ],
    ids=str,
)
def test_what_a_text_stands_for(parse: Callable[[str], object], text: str, expected: Any) -> None:
    assert parse(text) == expected


NO_DURATIONS = "d 7x -1 -1h 1h-5m 30m1h 1h1h h30 1,5h inf nan 1e3 ٣ 0x10 .".split()
REFUSED: list[tuple[Callable[[str], object], str, list[str]]] = [
    (duration, "7d, 90m, 1h30m, 45s", ["", " ", "7 days", "1h 30m", *NO_DURATIONS]),
    (duration, "century", ["101w200000d", "99999999999999999999", "36526d"]),
    (positive_duration, "above zero", ["0s"]),
    (instant, "not an instant", "yesterday 2026-13-01 2026-02-30T10:00 1.3.2026 1 0.5".split()),
    (instant, "not an instant", ["", " 30 "]),
    (positive_int, "at least 1", ["0", "-1", "1.5", "", "x"]),
    (non_negative_int, "at least 0", ["-1", "², "]),
    (retention, "has no unit", ["1", "0.5", " 30 "]),
    (share, "not a percentage", ["101", "-1", "", "a tenth"]),
]


@cases(("parse", "expected", "texts"), REFUSED, ids=str)
def test_what_cannot_be_read_says_what_is_expected(
    parse: Callable[[str], object], expected: str, texts: list[str]
) -> None:
    for text in texts:
        with pytest.raises(ArgumentTypeError, match=expected):
            parse(text)


@given(st.integers(0, 99), st.integers(0, 23), st.integers(0, 59), st.integers(1, 59))
def test_a_duration_is_the_sum_of_its_parts(d: int, h: int, m: int, s: int) -> None:
    assert (
        duration(f"{d}d{h}h{m}m{s}s")
        == timedelta(days=d, hours=h, minutes=m, seconds=s).total_seconds()
    )


@given(st.text(max_size=20))
def test_any_text_is_a_duration_or_an_argument_error(text: str) -> None:
    for parse in {each for each, *_ in REFUSED}:
        try:
            parse(text)
        except ArgumentTypeError as error:
            assert repr(text) in str(error)  # noqa: PT017 - most texts raise nothing else


def test_a_table_has_columns_as_wide_as_their_widest_cell() -> None:
    rows = [{"a": "long", "the_b": "x"}, {"a": None, "the_b": "longer\n y"}]
    assert [*table(rows)] == ["A     THE B", "long  x", "-     longer y"]
    assert [*table(rows, ("the_b",))] == ["THE B", "x", "longer y"]
    assert [*table([])] == []


def test_cells_are_for_people() -> None:
    at = datetime(2026, 3, 1, 8, 30, tzinfo=timezone.utc)
    more = AtLeast(10_000)
    values = [at, True, False, 1.6, ["a", 2], {"a": 2}, "", 0, None, more, {"a": more}, [more]]
    told = ["2026-03-01 08:30:00+00:00", "yes", "-", "1.6 s", "a, 2", "a 2", "-", "0", "-"]
    assert [*map(cell, values)] == [*told, "10,000+", "a 10,000+", "10,000+"]
    assert json.loads(as_json({"due": more})) == {"due": 10_000}


def test_a_duration_is_in_its_two_largest_units() -> None:
    seconds = [0.0, 0.25, 59.6, 61.0, 5400.0, 90_061.0, 604_800.0]
    texts = ["0 s", "250 ms", "1 min", "1 min", "1 h 30 min", "25 h 1 min", "7 d"]
    assert [*map(cell, seconds)] == texts


def test_a_command_tells_what_it_could_not_read() -> None:
    with pytest.raises(CommandError, match=r"--max-lag.*'7 days' is not a duration; expected"):
        call_command("outbox_status", "--max-lag=7 days")
