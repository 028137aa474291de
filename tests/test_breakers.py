"""Circuit breakers of queues."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxOperation, OutboxPause, OutboxStream
from django_outbox.signals import breaker_opened
from django_outbox.worker.deliveries import Deliveries
from django_outbox.worker.gate import Gate
from tests.surroundings import heard
from tests.table import insert, keyed, listening, now, row, statuses, write
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

SENT = "hook.sent"
BREAKER = {"failures": 3, "within": 60, "pause": 60}
POLLS = 3
OUTBOX = {
    "QUEUES": {"hooks": {"WORKERS": 1, "BREAKER": BREAKER}},
    "PROBE_INTERVAL": 0.05,
    "RETRY": {"policy": "fixed", "delay": 0.05, "max_attempts": 50},
}


@pytest.fixture(autouse=True)
def with_breaker(settings: Any) -> None:
    settings.OUTBOX = OUTBOX


class Partner:
    """A listener that fails while the partner is away."""

    def __init__(self) -> None:
        self.is_away, self.calls = True, list[str]()

    def __call__(self, event: outbox.Event) -> None:
        self.calls.append(event.event_id)
        if self.is_away:
            raise ConnectionError("the partner is away")


def breaker() -> OutboxPause | None:
    return OutboxPause.objects.filter(kind="breaker").first()


def seconds_left() -> float:
    """Return the seconds until the pause of the open breaker is over."""
    found = breaker()
    assert found is not None
    assert found.until is not None
    return (found.until - now()).total_seconds()


def end_pause() -> None:
    OutboxPause.objects.filter(kind="breaker").update(until=now() - timedelta(seconds=1))


def operations() -> list[str]:
    rows = OutboxOperation.objects.filter(about__startswith="queue hooks").order_by("pk")
    return [*rows.values_list("kind", flat=True)]


def several_polls() -> None:
    """Wait until the worker has polled several times: each finds an event of another queue."""
    with listening(lambda event: None):
        for _ in range(POLLS):
            (event_id,) = insert()
            wait_until(lambda event_id=event_id: row(event_id).status == Status.DONE)  # type: ignore[misc]


def test_it_opens_after_failures_in_a_row_and_nothing_more_is_called() -> None:
    partner = Partner()
    with heard(breaker_opened) as told, listening(partner, SENT, queue="hooks"), outbox.Worker():
        insert(100, event_type=SENT, queue="hooks")
        found = wait_until(breaker)
        wait_until(lambda: not OutboxEvent.objects.leased().exists())
        several_polls()
    assert len(partner.calls) == 3
    assert (found.name, found.pause_seconds) == ("hooks", 60)
    assert found.until is not None
    assert 50 < (found.until - found.paused_at).total_seconds() < 61
    assert "3 consecutive failures" in found.reason
    assert "ConnectionError" in found.reason
    assert [(each["queue"], each["pause"]) for each in told] == [("hooks", 60)]
    assert operations() == ["breaker_opened"]
    assert OutboxEvent.objects.filter(event_type=SENT, attempts=0).count() == 97


def test_a_probe_that_fails_costs_one_attempt_and_doubles_the_pause() -> None:
    partner = Partner()
    with listening(partner, SENT, queue="hooks"), outbox.Worker():
        insert(20, event_type=SENT, queue="hooks")
        wait_until(breaker)
        for number, length in enumerate((120, 240, 480, 600, 600), 4):
            end_pause()
            wait_until(lambda: len(partner.calls) == number)  # noqa: B023
            wait_until(lambda: length - 60 < seconds_left() <= length)  # noqa: B023
            assert (breaker() or OutboxPause()).pause_seconds == length
    assert len(partner.calls) == 8
    assert sum(OutboxEvent.objects.values_list("attempts", flat=True)) == 8
    probes = partner.calls[3:]
    assert len({*probes}) == 5  # each probe takes another event
    assert operations() == ["breaker_opened"]  # a failed probe opens nothing anew


def test_a_stream_can_be_the_probe() -> None:
    partner = Partner()
    with listening(partner, SENT, queue="hooks"), outbox.Worker():
        write(3, SENT)
        wait_until(breaker)
        OutboxEvent.objects.all().delete()
        partner.is_away = False
        keyed("a", 5, event_type=SENT)
        end_pause()
        wait_until(lambda: statuses() == {"DONE": 5})
        wait_until(lambda: breaker() is None)
        wait_until(lambda: operations() == ["breaker_opened", "breaker_closed"])


def test_an_open_breaker_ends_with_its_pause_when_its_queue_has_none_any_more(
    settings: Any,
) -> None:
    partner = Partner()
    with listening(partner, SENT, queue="hooks"):
        with outbox.Worker():
            write(20, SENT)
            wait_until(breaker)
        partner.is_away = False
        settings.OUTBOX = {**OUTBOX, "QUEUES": {"hooks": {"WORKERS": 1}}}
        with outbox.Worker():
            several_polls()
            assert len(partner.calls) == 3
            end_pause()
            wait_until(lambda: statuses() == {"DONE": 20 + POLLS})
            wait_until(lambda: breaker() is None)


@pytest.mark.parametrize("options", [{}, {"batch": 10}], ids=["single", "batch"])
def test_a_lost_stream_that_a_closed_queue_turned_away_is_delivered(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue was closed for the moment in which a thread took the stream's first event."""
    start, turned_away = Deliveries.start, list[str]()

    def closed_once(given: Deliveries, leases: Any, is_stopping: Any) -> Any:
        if turned_away:
            return start(given, leases, is_stopping)
        turned_away.extend(each.event_id for each in leases)
        with monkeypatch.context() as patch:
            patch.setattr(Gate, "closed", True)
            return start(given, leases, is_stopping)

    monkeypatch.setattr(Deliveries, "start", closed_once)
    ids = keyed("order-7", 3, event_type=SENT, queue="hooks")
    lost = {"locked_by": "lost", "due_at": now() - timedelta(seconds=1), "queue": "hooks"}
    OutboxStream.objects.filter(stream__of_key="order-7").update(**lost)
    with listening(lambda event: None, SENT, queue="hooks", **options), outbox.Worker():
        wait_until(lambda: statuses() == {"DONE": 3})
    assert turned_away == ids[:1]
