"""The watermark of claims: its arithmetic, and what full scans find although they pause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

import django_outbox as outbox
from django_outbox import clocks, doorbell
from django_outbox.models import OutboxLease
from django_outbox.sql.values import Found
from django_outbox.worker import polling
from django_outbox.worker.polling import LATE_COMMIT_MARGIN, Throttle, Watermark
from tests.table import insert, keyed, listening, purging, rest_of, statuses, write
from tests.waiting import wait_until

FAR = {"POLL_INTERVAL": 600, "PROBE_INTERVAL": 600}

ALL, SOME = Found(more=False), Found(more=True, waited=40.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock that watermarks and throttles use."""
    found = Clock()
    monkeypatch.setattr(polling, "monotonic", found.monotonic)
    monkeypatch.setattr(polling.random, "uniform", lambda low, high: 1.0)
    return found


def claim(clock: Clock, it: Watermark, found: Found, *, took: float = 0.5) -> float | None:
    """Claim once; return how many seconds back the claim looks."""
    age = it.begin_claim(scan=False)
    clock.now += took
    it.end_claim(found)
    return age


def pause_for(seconds: float) -> Callable[[Throttle, float], None]:
    """Return a ``Throttle.after`` that pauses for this long, unless its factor is 0."""

    def after(self: Throttle, started: float) -> None:
        self.until = clocks.monotonic() + seconds * bool(self._factor)

    return after


def test_a_claim_begins_where_the_one_before_it_ended(clock: Clock) -> None:
    it = Watermark(margin=3)
    claim(clock, it, Found(more=True, waited=70), took=0)
    assert claim(clock, it, ALL) == 70 + LATE_COMMIT_MARGIN + 3
    clock.now += 2
    assert claim(clock, it, ALL) == 0.5 + 2 + LATE_COMMIT_MARGIN + 3
    assert claim(clock, it, ALL) == 0.5 + LATE_COMMIT_MARGIN + 3


def test_a_claim_that_left_some_is_followed_by_one_that_begins_where_it_began(clock: Clock) -> None:
    it = Watermark()
    claim(clock, it, SOME)
    assert claim(clock, it, SOME) == 0.5 + 40 + LATE_COMMIT_MARGIN


def test_what_was_skipped_is_above_the_watermark(clock: Clock) -> None:
    it = Watermark()
    claim(clock, it, ALL)
    clock.now += 5
    assert it.begin_claim(scan=False) == 5.5 + LATE_COMMIT_MARGIN  # and is not counted
    clock.now += 1
    assert it.begin_claim(scan=False) == 6.5 + LATE_COMMIT_MARGIN


def test_a_pause_is_a_multiple_of_the_work_but_bounded(clock: Clock) -> None:
    it = Throttle()
    short = polling.FULL_SCAN_FACTOR * 0.005
    expected = [0, short, short, polling.LONGEST_PAUSE, 20 * short]  # the shorter of the two
    for took, pause in zip((0.1, 0.005, 1000.0, 1000.0, 0.1), expected, strict=True):
        started, clock.now = clock.now, clock.now + took
        it.after(started)
        assert it.until == pytest.approx(clock.now + pause)


@pytest.mark.django_db(transaction=True)
def test_what_commits_late_is_found_by_the_next_full_scan(settings: Any) -> None:
    settings.OUTBOX = FAR
    with listening(lambda event: None), outbox.Worker():
        for number in range(1, 6):
            write()
            insert(due=-60 * number)  # as if its transaction had been open that long
            keyed(f"a-{number}", due=-60 * number)
            doorbell.ring(connection)
            wait_until(lambda n=number: statuses() == {"DONE": 3 * n}, what="what is late")


@pytest.mark.django_db(transaction=True)
def test_a_long_purge_is_followed_by_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    for me, rest, least, most in (("a", 0.1, 50, 100), ("b", 3000.0, 2900, 3000)):
        monkeypatch.setattr(Throttle, "after", pause_for(rest))
        OutboxLease.objects.update(state=None)
        purger = purging(100, me=me)
        pause = rest_of(purger)
        assert least <= pause <= most
        assert purging(100, me="another").run() >= min(pause, 100) / 2  # other workers wait too
