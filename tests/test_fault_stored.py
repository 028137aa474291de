"""The oracle of the relay scenarios: what it says of a broker that lost, invented or mixed up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.faults import oracle
from tests.faults.oracle import Evidence, Intent, Row, Verdict


def judged(stored: Sequence[str] | None, *, done: str = "abc", key: str | None = "k") -> Verdict:
    """Judge a broker that holds these events, of which a, b and c were written in this order."""
    places = [*enumerate("abc", 1)]
    intents = {
        each: Intent(event_id=each, kind="relayed", key=key, writer=1, n=n, at=0.0)
        for n, each in places
    }
    rows = {
        each: Row(event_id=each, status=int(each in done), attempts=0, key=key, seq=n, leased=False)
        for n, each in places
    }
    return oracle.judge(
        Evidence(
            intents=intents,
            rows=rows,
            lines=(),
            faults=(),
            pids=(),
            bookings={},
            lease=1.0,
            relayed=("relayed",),
            stored=stored,
        )
    )


def wrong(verdict: Verdict) -> dict[str, int]:
    return {name: count for name in verdict.VIOLATIONS if (count := getattr(verdict, name))}


@pytest.mark.parametrize("stored", ["abc", "aabc", "abcabc"])
def test_copies_are_counted_and_are_no_fault(stored: str) -> None:
    verdict = judged(stored)
    assert wrong(verdict) == {}
    assert (verdict.runs, verdict.repeats) == (len(stored), len(stored) - 3)


def test_what_is_done_and_not_in_the_broker_is_lost() -> None:
    assert wrong(judged("ac")) == {"lost": 1, "done_without_effect": 1}
    assert wrong(judged("ac", done="ac")) == {"stuck": 1}


def test_a_broker_that_nobody_could_read_accuses_no_one() -> None:
    assert wrong(judged(None)) == {}


def test_what_was_never_written_is_a_ghost() -> None:
    assert wrong(judged("abcx")) == {"ghosts": 1}


def test_the_first_copies_of_a_key_are_in_order() -> None:
    assert wrong(judged("acb")) == {"inversions": 1}
    assert wrong(judged("acb", key=None)) == {}
    assert wrong(judged("abacb")) == {}
