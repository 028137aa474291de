"""A test that goes through a table of cases: it names each case that fails."""

from __future__ import annotations

import pytest

from tests.cases import cases


def test_every_failing_case_is_reported() -> None:
    @cases("left, right", [(1, 1), (1, 2), (3, 3), (3, 4)], ids=["a", "b", "c", "d"])
    def same(left: int, right: int) -> None:
        assert left == right

    with pytest.raises(AssertionError) as caught:
        same()
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("2 of 4")
    assert [line[:2] for line in lines if line[1:2] == ":"] == ["b:", "d:"]


def test_an_exception_that_does_not_come_is_a_failing_case() -> None:
    @cases("text", ["1", "x", "2"])
    def fails(text: str) -> None:
        with pytest.raises(ValueError, match="invalid"):
            int(text)

    with pytest.raises(AssertionError, match=r"(?s)2 of 3.*'1': .*'2': "):
        fails()


def test_a_table_without_cases_is_refused() -> None:
    with pytest.raises(AssertionError):
        cases("text", [])


@cases("factor", [1, 2])
@cases("number", [3, 4])
def test_tables_multiply_and_fixtures_are_passed(
    number: int, factor: int, record_property: object
) -> None:
    assert callable(record_property)
    assert number * factor in (3, 4, 6, 8)
