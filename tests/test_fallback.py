"""Fallbacks: called once when a listener has failed for good."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from django.core.checks import run_checks
from django.db import connection, transaction

import django_outbox as outbox
from django_outbox.listeners import registry
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests import samples
from tests.surroundings import both, inside, outside_alone
from tests.table import PLACED, insert, listening, row, statuses, write
from tests.testapp.models import Effect, Order
from tests.waiting import wait_until

ONCE = outbox.Fixed(0, max_attempts=1)
TWICE = outbox.Fixed(0, max_attempts=2)


class Fallback:
    """Records its calls and runs the work that it is given."""

    def __init__(self, work: Callable[[outbox.Event, outbox.Failure], Any] | None = None) -> None:
        self.work = work or (lambda event, failure: None)
        self.calls: list[tuple[outbox.Event, outbox.Failure]] = []

    def __call__(self, event: outbox.Event, failure: outbox.Failure) -> Any:
        self.calls.append((event, failure))
        return self.work(event, failure)


@contextmanager
def guarded(listen: Callable[..., Any], fallback: Any, **options: Any) -> Iterator[None]:
    """Register a listener and its fallback for the duration of a block."""
    with listening(listen, **options):
        registry.fallback(listen, fallback)
        yield


def raising(error: BaseException) -> Callable[[outbox.Event], None]:
    def listen(event: outbox.Event) -> None:
        raise error

    return listen


def effect(event: outbox.Event, phase: str) -> None:
    Effect.objects.create(event_id=event.event_id, pid=0, phase=phase)


def drain(times: int = 1) -> None:
    for _ in range(times):
        outbox.drain()


# -- when it is called -----------------------------------------------------------------------------


@both
def test_n5_spent_retries_lead_to_it_once_and_its_success_is_done(outside: bool) -> None:
    (event_id,) = write(headers={"trace": "7"}, aggregate_type="shop.Order", aggregate_id="9")
    fallback = Fallback()
    with guarded(raising(LookupError("sold out")), fallback, retry=TWICE):
        drain()
        assert statuses() == {"RETRY": 1}
        assert fallback.calls == []
        drain(3)
    assert statuses() == {"DONE": 1}
    ((event, failure),) = fallback.calls
    assert event.event_id == event_id
    assert dict(event.headers) == {"trace": "7"}
    assert (event.aggregate_type, event.aggregate_id) == ("shop.Order", "9")
    assert event.payload == {"n": 0}
    assert (failure.listener, failure.attempts) == (PLACED, 2)
    assert str(failure.exception) == "sold out"
    assert isinstance(failure.exception, LookupError)
    assert failure.text.startswith("LookupError: sold out\nTraceback")
    assert row(event_id).attempts == 2
    assert "sold out" in str(row(event_id).last_error)  # it says why the fallback was called


@both
@pytest.mark.parametrize(
    ("error", "policy", "spent"),
    [
        (outbox.Unrecoverable("never"), outbox.Fixed(0), 0),
        (KeyError("sku"), outbox.Fixed(0, give_up_on=(LookupError,)), 1),
        (KeyError("sku"), outbox.Fixed(0, retry_on=(TimeoutError,)), 1),
        (outbox.PayloadError("does not fit"), outbox.Fixed(0), 0),
        (outbox.RetryAfter(5), ONCE, 1),
    ],
    ids=["unrecoverable", "given_up_on", "not_retried_on", "payload", "retry_after"],
)
def test_n5_what_is_not_retried_goes_straight_to_it(
    outside: bool, error: BaseException, policy: Any, spent: int
) -> None:
    (event_id,) = write()
    fallback = Fallback()
    with guarded(raising(error), fallback, retry=policy):
        drain()
    assert statuses() == {"DONE": 1}
    ((_, failure),) = fallback.calls
    assert failure.exception is error
    assert failure.attempts == 1
    assert row(event_id).attempts == spent


@inside
@pytest.mark.parametrize(
    ("columns", "listen", "status"),
    [
        ({}, lambda event: outbox.Dead("refused"), "DEAD"),
        ({"payload": "{"}, raising(LookupError()), "DEAD"),
        ({"headers": "["}, raising(LookupError()), "DEAD"),
        ({"rescues": 4, "locked_by": "lost", "due": -1}, raising(LookupError()), "DEAD"),
        ({}, lambda event: None, "DONE"),
        ({}, lambda event: outbox.Defer(600), "NEW"),
    ],
    ids=["Dead", "payload", "headers", "poison", "success", "Defer"],
)
def test_what_is_no_failure_of_the_listener_is_not_for_it(
    columns: dict[str, Any], listen: Any, status: str
) -> None:
    insert(**columns)
    fallback = Fallback()
    with guarded(listen, fallback):
        drain()
    assert statuses() == {status: 1}
    assert fallback.calls == []


# -- what becomes of the event ---------------------------------------------------------------------


@both
def test_n5_its_failure_is_dead_with_both_errors(outside: bool) -> None:
    (event_id,) = write()

    def fails(event: outbox.Event, failure: outbox.Failure) -> None:
        raise RuntimeError("nobody answers the phone") from failure.exception

    with guarded(raising(LookupError("sold out")), Fallback(fails), retry=ONCE):
        drain()
    assert statuses() == {"DEAD": 1}
    text = str(row(event_id).last_error)
    assert text.startswith("LookupError: sold out\n")  # the listener's error comes first
    assert "\n\nThe fallback: RuntimeError: nobody answers the phone\n" in text
    assert text.rstrip().endswith("RuntimeError: nobody answers the phone")
    assert row(event_id).attempts == 1


@both
def test_it_may_leave_the_event_dead_for_a_person(outside: bool) -> None:
    """A fallback that returns Dead leaves the event to be replayed once the cause is fixed."""
    (event_id,) = write()
    fallback = Fallback(lambda event, failure: outbox.Dead("the warehouse was told"))
    with guarded(raising(LookupError("sold out")), fallback, retry=ONCE):
        drain()
        assert statuses() == {"DEAD": 1}
        text = str(row(event_id).last_error)
        assert text.startswith("LookupError: sold out\n")
        assert text.endswith("The fallback: the warehouse was told")
        OutboxEvent.objects.dead().replay()
        drain()
    assert len(fallback.calls) == 2


@both
def test_it_cannot_defer(outside: bool) -> None:
    (event_id,) = write()
    with guarded(
        raising(LookupError()), Fallback(lambda event, failure: outbox.Defer(5)), retry=ONCE
    ):
        drain()
    assert statuses() == {"DEAD": 1}
    assert "it answered Defer; expected None or Dead" in str(row(event_id).last_error)


@both
@pytest.mark.parametrize("answer", [None, outbox.Done(), "whatever", False], ids=repr)
def test_whatever_else_it_answers_is_done(outside: bool, answer: Any) -> None:
    write()
    with guarded(raising(LookupError()), Fallback(lambda event, failure: answer), retry=ONCE):
        drain()
    assert statuses() == {"DONE": 1}


# -- its surroundings ------------------------------------------------------------------------------


@both
def test_of_an_atomic_listener_it_commits_with_done(outside: bool) -> None:
    """The listener's transaction is rolled back; the fallback runs in its own."""
    write()
    depths: list[int] = []

    def listen(event: outbox.Event) -> None:
        effect(event, "listener")
        raise LookupError

    def fall_back(event: outbox.Event, failure: outbox.Failure) -> None:
        depths.append(len(connection.atomic_blocks))
        effect(event, "fallback")

    before = len(connection.atomic_blocks)
    with guarded(listen, Fallback(fall_back), atomic=True, retry=ONCE):
        drain()
    assert [*Effect.objects.values_list("phase", flat=True)] == ["fallback"]
    assert statuses() == {"DONE": 1}
    assert depths == [before + 1]


@outside_alone
def test_in_a_drain_an_interrupt_of_a_fallback_ends_it_too() -> None:
    (event_id,) = write()

    def ends(event: outbox.Event, failure: outbox.Failure) -> None:
        raise KeyboardInterrupt

    with (
        guarded(raising(LookupError()), Fallback(ends), retry=ONCE),
        pytest.raises(KeyboardInterrupt),
    ):
        drain()
    found = row(event_id)
    assert (found.status, found.attempts) == (Status.NEW, 0)


# -- several listeners -----------------------------------------------------------------------------


@both
def test_each_listener_of_an_event_has_its_own(outside: bool) -> None:
    (event_id,) = write()
    saved, lost = Fallback(), Fallback(lambda event, failure: outbox.Dead("no"))
    with (
        guarded(raising(LookupError("a")), saved, name="a", retry=TWICE),
        guarded(raising(LookupError("b")), lost, name="b", retry=ONCE),
        listening(lambda event: None, name="c"),
    ):
        drain(3)
    assert statuses() == {"DONE": 2, "DEAD": 1}
    ((event, failure),) = saved.calls
    assert (failure.listener, failure.attempts, event.listener) == (f"{PLACED} a", 2, f"{PLACED} a")
    assert len(lost.calls) == 1
    dead = OutboxEvent.objects.of_event(event_id).get(status=Status.DEAD)
    assert dead.listener == f"{PLACED} b"
    assert str(dead.last_error).startswith("LookupError: b")


# -- in a worker -----------------------------------------------------------------------------------


@outside_alone
def test_n5_in_a_worker(settings: Any) -> None:
    settings.OUTBOX = {}
    fallback = Fallback(lambda event, failure: effect(event, "fallback"))
    policy = outbox.Fixed(0.01, max_attempts=3)
    with guarded(raising(SystemExit(3)), fallback, retry=policy), outbox.Worker():
        ids = write(10)
        wait_until(lambda: statuses() == {"DONE": 10}, what="10 DONE")
    assert sorted(event.event_id for event, _ in fallback.calls) == sorted(ids)
    assert Effect.objects.count() == 10
    assert {failure.attempts for _, failure in fallback.calls} == {3}


# -- async -----------------------------------------------------------------------------------------


async def afails(event: outbox.Event) -> None:
    await asyncio.sleep(0)
    raise LookupError("sold out")


async def nap(event: outbox.Event, failure: outbox.Failure) -> None:
    await asyncio.sleep(0)
    await Effect.objects.acreate(event_id=event.event_id, pid=0, phase=failure.listener)


def plain(event: outbox.Event, failure: outbox.Failure) -> None:
    effect(event, failure.listener)  # a query: it must not run on the event loop


@outside_alone
@pytest.mark.parametrize("fallback", [functools.partial(nap), plain], ids=["async", "plain"])
@pytest.mark.parametrize("where", ["worker", "drain"])
def test_344_of_async_listeners_it_may_be_either(settings: Any, fallback: Any, where: str) -> None:
    settings.OUTBOX = {}
    with guarded(afails, fallback, retry=outbox.Fixed(0.01, max_attempts=2)):
        if where == "worker":
            with outbox.Worker():
                write(3)
                wait_until(lambda: statuses() == {"DONE": 3}, what="3 DONE")
        else:
            write(3)
            wait_until(lambda: outbox.drain() == 0 and statuses() == {"DONE": 3}, what="3 DONE")
    assert [*Effect.objects.values_list("phase", flat=True)] == [PLACED] * 3


@both
def test_344_an_async_one_of_a_plain_listener_is_awaited(outside: bool) -> None:
    write()
    called: list[str] = []

    async def fall_back(event: outbox.Event, failure: outbox.Failure) -> None:
        await asyncio.sleep(0)
        called.append(failure.listener)

    with guarded(raising(LookupError()), fall_back, retry=ONCE):
        drain()
    assert called == [PLACED]
    assert statuses() == {"DONE": 1}


@outside_alone
def test_an_async_one_past_the_timeout_is_cancelled_and_the_event_dead(settings: Any) -> None:
    settings.OUTBOX = {}
    ends: list[str] = []

    async def endless(event: outbox.Event, failure: outbox.Failure) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append(type(failure.exception).__name__)
            raise

    async def listen(event: outbox.Event) -> None:
        await asyncio.Event().wait()

    with guarded(listen, endless, timeout=0.05, retry=ONCE), outbox.Worker():
        (event_id,) = write()
        wait_until(lambda: statuses() == {"DEAD": 1}, what="DEAD")
    assert ends == ["ListenerTimeout"]
    assert str(row(event_id).last_error).count("ListenerTimeout: ") >= 2


# -- registration ----------------------------------------------------------------------------------


@pytest.fixture
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_listeners", {})
    registry._clear_route_caches()
    yield
    registry._clear_route_caches()


registering = pytest.mark.usefixtures("empty_registry")


@registering
def test_340_the_listener_decorates_it() -> None:
    @outbox.listener(PLACED)
    def reserve(event: outbox.Event) -> None: ...

    @reserve.fallback
    def tell(event: outbox.Event, failure: outbox.Failure) -> None: ...

    (found,) = registry.listeners()
    assert found.call is reserve
    assert found.fallback is tell


@registering
def test_343_it_decorates_several_and_holds_for_every_registration() -> None:
    @outbox.listener("order.placed")
    @outbox.listener("order.submitted")
    def reserve(event: outbox.Event) -> None: ...

    @outbox.listener("order.paid")
    async def pay(event: outbox.Event) -> None: ...

    @reserve.fallback
    @pay.fallback
    def tell(event: outbox.Event, failure: outbox.Failure) -> None: ...

    assert [each.fallback for each in registry.listeners()] == [tell] * 3


@registering
@pytest.mark.parametrize(
    ("fallback", "fits"),
    [
        (lambda event, failure: None, True),
        (lambda *args: None, True),
        (nap, True),
        (Fallback(), True),
        (lambda event: None, False),
        (lambda: None, False),
        (lambda event, failure, more: None, False),
        (lambda event, *, failure: None, False),
        (lambda event, failure: (yield), False),
    ],
    ids="two any async object one none three keyword generator".split(),
)
def test_344_another_signature_is_a_check_error(fallback: Any, fits: bool) -> None:
    def reserve(event: outbox.Event) -> None: ...

    outbox.listener(PLACED)(reserve)
    registry.fallback(reserve, fallback)
    errors = [each for each in run_checks(tags=["django_outbox"]) if "E012" in str(each.id)]
    assert len(errors) == (0 if fits else 1)
    if not fits:
        assert "lambda" in errors[0].msg
        assert errors[0].hint == "Give it the signature (event, failure)."
        assert errors[0].is_serious()


# -- the documentation -----------------------------------------------------------------------------


@both
def test_the_samples_of_the_how_to(outside: bool) -> None:
    order = Order.objects.create(sku="B-7")
    cards, courier, pager = Mock(), Mock(), Mock()
    cards.charge.side_effect = outbox.Unrecoverable("the card is blocked")
    courier.book.side_effect = outbox.Unrecoverable("no such street")
    given = {"cards": cards, "courier": courier, "pager": pager, "Order": Order}
    with samples.run(
        "how-to/retry.md#Fall back when a listener fails for good", transaction=transaction, **given
    ):
        write(event_type="payment.requested", payload={"order": order.pk, "amount": 5})
        write(event_type="parcel.requested", payload={"to": "nowhere"})
        outbox.drain(limit=2)
    assert statuses() == {"DONE": 1, "DEAD": 1, "NEW": 1}
    order.refresh_from_db()
    assert order.sku == "cancelled"
    cancelled = OutboxEvent.objects.get(event_type="order.cancelled")
    assert "the card is blocked" in cancelled.payload
    pager.send.assert_called_once_with("parcel.requested failed 1 times: no such street")
    assert "the team was alerted" in str(OutboxEvent.objects.dead().get().last_error)
