"""Interceptors: context managers around each call of a listener."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.checks import run_checks
from django.db import transaction

import django_outbox as outbox
from django_outbox import hooks
from django_outbox.listeners import registry
from tests.table import PLACED, listening, row, statuses, write
from tests.testapp.models import Effect
from tests.waiting import wait_until

# Runs a test twice: inside a transaction that is rolled back, as in a TestCase, and outside.
both = pytest.mark.parametrize(
    "outside",
    [
        pytest.param(False, marks=pytest.mark.django_db, id="inside"),
        pytest.param(True, marks=pytest.mark.django_db(transaction=True), id="outside"),
    ],
)
outside_alone = pytest.mark.django_db(transaction=True)

ONCE = outbox.Fixed(0, max_attempts=1)
SESSION: ContextVar[str] = ContextVar("SESSION", default="none")

trace: list[str] = []  # what happened, in order; emptied before each test


@pytest.fixture(autouse=True)
def empty_trace() -> None:
    trace.clear()


def saw(raised: BaseException | None) -> str:
    return type(raised).__name__ if raised else "nothing"


def tracing(name: str) -> Callable[[outbox.Event], Any]:
    class Tracing:
        def __init__(self, event: outbox.Event) -> None:
            self.who = event.listener

        def __enter__(self) -> None:
            trace.append(f"{name} enters {self.who}")

        def __exit__(self, kind: object, raised: BaseException | None, where: object) -> bool:
            trace.append(f"{name} saw {saw(raised)}")
            return True  # asks to swallow the error, which must not work

    return Tracing


outer, inner = tracing("outer"), tracing("inner")


@contextmanager
def session(event: outbox.Event) -> Iterator[None]:
    """Set ``SESSION`` from the header that the writer stored."""
    token = SESSION.set(event.headers.get("session", "unknown"))
    try:
        yield
    finally:
        SESSION.reset(token)


@contextmanager
def swallowing(event: outbox.Event) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - it tries to swallow the error
        trace.append(f"swallowed {saw(error)}")


def refusing(event: outbox.Event) -> Any:
    raise PermissionError("not in the mood")


@contextmanager
def refusing_inside(event: outbox.Event) -> Iterator[None]:
    raise PermissionError("not in the mood")
    yield


@contextmanager
def failing_at_the_end(event: outbox.Event) -> Iterator[None]:
    yield
    raise PermissionError("too late")


@contextmanager
def failing_in_its_finally(event: outbox.Event) -> Iterator[None]:
    try:
        yield
    finally:
        raise PermissionError("instead of yours")


@contextmanager
def exiting(event: outbox.Event) -> Iterator[None]:
    yield
    raise SystemExit(5)


@contextmanager
def interrupting(event: outbox.Event) -> Iterator[None]:
    yield
    raise KeyboardInterrupt


def no_manager(event: outbox.Event) -> str:
    return "a str"


NUMBER = 5


def intercepted(*names: str) -> dict[str, Any]:
    return {"INTERCEPTORS": [f"{__name__}.{name}" for name in names]}


def note(event: outbox.Event) -> None:
    trace.append(f"called {event.listener}")


async def anote(event: outbox.Event) -> None:
    await asyncio.sleep(0)
    trace.append(f"called {event.listener}")


def fails(event: outbox.Event) -> None:
    raise LookupError("sold out")


async def afails(event: outbox.Event) -> None:
    await asyncio.sleep(0)
    raise LookupError("sold out")


def deliver(listener: Callable[..., Any], where: str, count: int = 1, **options: Any) -> str:
    """Write events and deliver them to the listener; return the id of the last."""
    with listening(listener, **options):
        if where == "worker":
            with outbox.Worker():
                ids = write(count)
                wait_until(lambda: settled(count), what="the end of the events")
        else:
            ids = write(count)
            while outbox.drain():
                pass
    return ids[-1]


def settled(count: int) -> bool:
    found = statuses()
    return found.get("DONE", 0) + found.get("DEAD", 0) == count


everywhere = pytest.mark.parametrize("where", ["drain", "worker"])
either_kind = pytest.mark.parametrize(
    ("good", "bad"), [(note, fails), (anote, afails)], ids=["plain", "async"]
)


# -- the order -------------------------------------------------------------------------------------


@outside_alone
@everywhere
@either_kind
def test_213_entered_in_order_and_left_in_reverse(
    settings: Any, where: str, good: Any, bad: Any
) -> None:
    settings.OUTBOX = intercepted("outer", "inner")
    deliver(good, where)
    assert trace == [
        f"outer enters {PLACED}",
        f"inner enters {PLACED}",
        f"called {PLACED}",
        "inner saw nothing",
        "outer saw nothing",
    ]
    assert statuses() == {"DONE": 1}


@outside_alone
@everywhere
@either_kind
def test_213_they_see_the_error_and_cannot_swallow_it(
    settings: Any, where: str, good: Any, bad: Any
) -> None:
    settings.OUTBOX = intercepted("outer", "inner", "swallowing")
    event_id = deliver(bad, where, retry=ONCE)
    assert trace[2:] == ["swallowed LookupError", "inner saw LookupError", "outer saw LookupError"]
    assert statuses() == {"DEAD": 1}
    assert str(row(event_id).last_error).startswith("LookupError: sold out")


@outside_alone
@everywhere
@either_kind
def test_an_answer_is_not_theirs_to_see_or_change(
    settings: Any, where: str, good: Any, bad: Any
) -> None:
    settings.OUTBOX = intercepted("outer")
    answers = [outbox.Dead("refused")]
    deliver(lambda event: answers[0], where)
    assert trace == [f"outer enters {PLACED}", "outer saw nothing"]
    assert statuses() == {"DEAD": 1}


@outside_alone
@everywhere
@either_kind
@pytest.mark.parametrize("name", ["refusing", "refusing_inside"])
def test_222_an_error_on_the_way_in_counts_as_the_listeners(
    settings: Any, where: str, good: Any, bad: Any, name: str
) -> None:
    settings.OUTBOX = intercepted("outer", name, "inner")
    event_id = deliver(good, where, retry=outbox.Fixed(0, max_attempts=2))
    assert trace == [f"outer enters {PLACED}", "outer saw PermissionError"] * 2
    assert statuses() == {"DEAD": 1}
    assert row(event_id).attempts == 2
    assert str(row(event_id).last_error).startswith("PermissionError: not in the mood")


@outside_alone
@everywhere
@either_kind
def test_what_is_no_context_manager_is_such_an_error_too(
    settings: Any, where: str, good: Any, bad: Any
) -> None:
    settings.OUTBOX = intercepted("no_manager")
    event_id = deliver(good, where, retry=ONCE)
    assert trace == []
    assert "returned 'a str'; expected a context manager" in str(row(event_id).last_error)


@outside_alone
@everywhere
@either_kind
@pytest.mark.parametrize("name", ["failing_at_the_end", "failing_in_its_finally"])
def test_223_an_error_on_the_way_out_is_logged_and_swallowed(
    settings: Any, where: str, good: Any, bad: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings.OUTBOX = intercepted("outer", name)
    with caplog.at_level(logging.ERROR, "django_outbox"):
        deliver(good, where)
    assert statuses() == {"DONE": 1}
    assert trace[-1] == "outer saw nothing"
    assert "interceptor failed at its end" in caplog.text
    assert "PermissionError" in caplog.text


@outside_alone
@everywhere
@either_kind
def test_223_it_does_not_take_the_place_of_the_listeners(
    settings: Any, where: str, good: Any, bad: Any
) -> None:
    settings.OUTBOX = intercepted("outer", "failing_in_its_finally")
    event_id = deliver(bad, where, retry=ONCE)
    assert trace[-1] == "outer saw LookupError"
    assert str(row(event_id).last_error).startswith("LookupError: sold out")
    assert "instead of yours" not in str(row(event_id).last_error)


@outside_alone
@either_kind
def test_what_would_end_a_worker_does_not(settings: Any, good: Any, bad: Any) -> None:
    settings.OUTBOX = intercepted("exiting")
    deliver(good, "worker", 3)
    assert statuses() == {"DONE": 3}


@outside_alone
def test_in_a_drain_what_would_end_the_caller_does_not(settings: Any) -> None:
    settings.OUTBOX = intercepted("outer", "exiting")
    write()
    with listening(note):
        assert outbox.drain() == 1
    assert statuses() == {"DONE": 1}


@outside_alone
def test_in_a_drain_an_interrupt_ends_the_caller(settings: Any) -> None:
    settings.OUTBOX = intercepted("outer", "interrupting")
    write()
    with listening(note), pytest.raises(KeyboardInterrupt):
        outbox.drain()
    assert trace[-1] == "outer saw KeyboardInterrupt"
    assert statuses() == {"NEW": 1}


# -- around what -----------------------------------------------------------------------------------


@both
def test_with_several_listeners_once_around_each(outside: bool, settings: Any) -> None:
    settings.OUTBOX = intercepted("outer")
    write()
    with listening(note, name="a"), listening(anote, name="b"):
        outbox.drain()
    assert trace == [
        f"outer enters {PLACED} a",
        f"called {PLACED} a",
        "outer saw nothing",
        f"outer enters {PLACED} b",
        f"called {PLACED} b",
        "outer saw nothing",
    ]


@both
def test_what_nobody_listens_to_is_not_intercepted(outside: bool, settings: Any) -> None:
    settings.OUTBOX = {**intercepted("outer"), "UNROUTABLE_GRACE": 0}
    write()
    outbox.drain()
    assert trace == []
    assert statuses() == {"DEAD": 1}


@outside_alone
@everywhere
@either_kind
def test_a_fallback_is_called_within_them_too(
    settings: Any, where: str, good: Any, bad: Any
) -> None:
    settings.OUTBOX = intercepted("outer", "session")
    heard: list[str] = []

    def fall_back(event: outbox.Event, failure: outbox.Failure) -> None:
        trace.append(f"fallback of {event.listener}")
        heard.append(SESSION.get())

    with listening(bad, retry=ONCE):
        registry.fallback(bad, fall_back)
        write(headers={"session": "s-7"})
        if where == "drain":
            outbox.drain()
        else:
            with outbox.Worker():
                wait_until(lambda: settled(1), what="its end")
    assert trace == [
        f"outer enters {PLACED}",
        "outer saw LookupError",
        f"outer enters {PLACED}",
        f"fallback of {PLACED}",
        "outer saw nothing",
    ]
    assert heard == ["s-7"]
    assert statuses() == {"DONE": 1}


@contextmanager
def transacting(event: outbox.Event) -> Iterator[None]:
    trace.append(f"atomic {transaction.get_connection().in_atomic_block}")
    Effect.objects.create(event_id=event.event_id, pid=0, phase="interceptor")
    yield


@outside_alone
def test_of_an_atomic_listener_they_are_inside_its_transaction(settings: Any) -> None:
    """What an interceptor writes is rolled back with the listener."""
    settings.OUTBOX = intercepted("transacting")
    deliver(fails, "drain", atomic=True, retry=ONCE)
    assert trace == ["atomic True"]
    assert not Effect.objects.exists()


# -- context variables -----------------------------------------------------------------------------


@outside_alone
@everywhere
def test_g11_what_one_sets_reaches_the_listener_and_is_gone_afterwards(
    settings: Any, where: str
) -> None:
    settings.OUTBOX = {**intercepted("session"), "WORKERS": 1}
    heard: list[str] = []
    with listening(lambda event: heard.append(SESSION.get())):
        write(headers={"session": "s-1"})
        write(headers={"session": "s-2"})
        write()
        if where == "drain":
            outbox.drain()
        else:
            with outbox.Worker():
                wait_until(lambda: settled(3), what="3 DONE")
    assert heard == ["s-1", "s-2", "unknown"]
    assert SESSION.get() == "none"


@outside_alone
@pytest.mark.parametrize("timeout", [None, 10], ids=["unlimited", "limited"])
@everywhere
def test_g11_awaited_listeners_each_have_their_own(
    settings: Any, where: str, timeout: float | None
) -> None:
    """Many of them run at the same time, and part of each runs in a thread."""
    settings.OUTBOX = {**intercepted("session"), "ASYNC_CONCURRENCY": 20}
    heard: dict[str, set[str]] = {}

    async def listen(event: outbox.Event) -> None:
        mine = heard.setdefault(event.headers["session"], set())
        mine.add(SESSION.get())
        await asyncio.sleep(0.01)
        mine.add(SESSION.get())
        mine.add(await sync_to_async(SESSION.get)())

    with listening(listen, timeout=timeout):
        for number in range(20):
            write(headers={"session": f"s-{number}"})
        if where == "drain":
            outbox.drain()
        else:
            with outbox.Worker():
                wait_until(lambda: settled(20), what="20 DONE")
    assert heard == {f"s-{number}": {f"s-{number}"} for number in range(20)}


@contextmanager
def watching(event: outbox.Event) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        trace.append(f"saw {saw(error)}")
        raise


@outside_alone
@everywhere
def test_a_listener_past_its_timeout_is_seen_as_that(settings: Any, where: str) -> None:
    settings.OUTBOX = intercepted("watching")

    async def endless(event: outbox.Event) -> None:
        await asyncio.Event().wait()

    deliver(endless, where, timeout=0.05, retry=ONCE)
    assert trace == ["saw ListenerTimeout"]


# -- the setting -----------------------------------------------------------------------------------


# Any callable will do, such as a class or a function with @contextmanager.
@pytest.mark.parametrize("name", ["session", "outer"])
def test_224_it_may_be_any_callable_by_its_path(settings: Any, name: str) -> None:
    settings.OUTBOX = intercepted(name)
    assert hooks.interceptors() == (globals()[name],)
    settings.OUTBOX = {}
    assert hooks.interceptors() == ()


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        (["nonsense"], "cannot be imported"),
        ([f"{__name__}.session", f"{__name__}.nonsense"], "cannot be imported"),
        ([f"{__name__}.NUMBER"], "expected a callable that takes an event"),
    ],
    ids=["no_module", "no_name", "no_callable"],
)
def test_a_wrong_path_is_a_check_error(settings: Any, paths: list[str], says: str) -> None:
    settings.OUTBOX = {"INTERCEPTORS": paths}
    (error,) = [each for each in run_checks(tags=["django_outbox"]) if each.is_serious()]
    assert error.id == "django_outbox.E002"
    assert says in error.msg
    assert paths[-1] in error.msg


@outside_alone
def test_a_wrong_path_that_nobody_checked_loses_no_event(settings: Any) -> None:
    settings.OUTBOX = {"INTERCEPTORS": ["nonsense"]}
    with listening(note), outbox.Worker():
        (event_id,) = write()
        wait_until(lambda: row(event_id).attempts or row(event_id).status, what="an attempt")
    assert "ImproperlyConfigured" in str(row(event_id).last_error)
    assert statuses() == {"RETRY": 1}
