"""A worker that starts and stops leaves no session behind on any database."""

from __future__ import annotations

import pytest

from tests.test_cycles import cycle, idle, in_threads, nothing_left

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


__all__ = ["nothing_left"]  # fixtures


def test_cycles_with_a_doorbell(nothing_left: None) -> None:
    def go_on() -> int:
        return sum(cycle(alias, idle) for alias in ("default", "other") * 10)

    assert in_threads(*[go_on] * 2) != [0, 0]
