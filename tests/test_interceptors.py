"""Interceptors: context managers around each call of a listener."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
from django.core.checks import run_checks
from django.db import transaction

import django_outbox as outbox
from django_outbox.listeners import registry
from tests.surroundings import outside_alone
from tests.table import PLACED, listening, row, statuses, write
from tests.testapp.models import Effect
from tests.waiting import wait_until

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


Written = Sequence[dict[str, Any]]


def deliver(
    listener: Callable[..., Any], where: str, written: Written = ({},), **options: Any
) -> str:
    """Write events and deliver them to the listener; return the id of the last."""
    with listening(listener, **options):
        return deliver_all(where, written)


def deliver_all(where: str, written: Written) -> str:
    ids = [write(**each)[0] for each in written]
    if where == "worker":
        with outbox.Worker():
            wait_until(lambda: settled(len(ids)), what="the end of the events")
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

ENTERS = f"outer enters {PLACED}"
CALLED = f"called {PLACED}"
IN_ORDER = [ENTERS, f"inner enters {PLACED}", CALLED, "inner saw nothing", "outer saw nothing"]
SEEN = ["swallowed LookupError", "inner saw LookupError", "outer saw LookupError"]
REFUSED = [ENTERS, "outer saw PermissionError"] * 2
REFUSED_TYPE = [ENTERS, "outer saw TypeError"]
SOLD_OUT, NO_MOOD = "LookupError: sold out", "PermissionError: not in the mood"


@outside_alone
@everywhere
@either_kind
@pytest.mark.parametrize(
    ("names", "fails", "seen", "error"),
    [
        (["outer", "inner"], False, IN_ORDER, ""),
        (["outer", "inner", "swallowing"], True, [*IN_ORDER[:2], *SEEN], SOLD_OUT),
        (["outer", "refusing", "inner"], False, REFUSED, NO_MOOD),
        (["outer", "refusing_inside", "inner"], False, REFUSED, NO_MOOD),
        (["outer", "no_manager"], False, REFUSED_TYPE, "TypeError: The interceptor"),
        (["outer", "failing_at_the_end"], False, [ENTERS, CALLED, "outer saw nothing"], ""),
        (["outer", "failing_in_its_finally"], False, [ENTERS, CALLED, "outer saw nothing"], ""),
        (["outer", "failing_in_its_finally"], True, [ENTERS, "outer saw LookupError"], SOLD_OUT),
    ],
    ids="reverse swallowing refusing inside manager end finally instead".split(),
)
def test_213_222_223_what_they_see_and_what_becomes_of_their_errors(
    settings: Any,
    where: str,
    good: Any,
    bad: Any,
    names: list[str],
    fails: bool,
    seen: list[str],
    error: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An error on the way in counts as the listener's, one on the way out is only logged."""
    settings.OUTBOX = intercepted(*names)
    most = 2 if "refusing" in str(names) else 1
    event_id = deliver(bad if fails else good, where, retry=outbox.Fixed(0, max_attempts=most))
    assert trace == [*seen]
    assert str(row(event_id).last_error or "").startswith(error)
    assert statuses() == ({"DEAD": 1} if error else {"DONE": 1})
    assert ("interceptor failed at its end" in caplog.text) is ("failing" in str(names))


@outside_alone
def test_in_a_drain_an_interrupt_ends_the_caller(settings: Any) -> None:
    settings.OUTBOX = intercepted("outer", "interrupting")
    with pytest.raises(KeyboardInterrupt):
        deliver(note, "drain")
    assert trace[-1] == "outer saw KeyboardInterrupt"
    assert statuses() == {"NEW": 1}


# -- around what -----------------------------------------------------------------------------------


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
        deliver_all(where, [{"headers": {"session": "s-7"}}])
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
    written = [{"headers": {"session": "s-1"}}, {"headers": {"session": "s-2"}}, {}]
    deliver(lambda event: heard.append(SESSION.get()), where, written)
    assert heard == ["s-1", "s-2", "unknown"]
    assert SESSION.get() == "none"


# -- the setting -----------------------------------------------------------------------------------


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


# -- the event being delivered ---------------------------------------------------------------------


def note_current(found: Any) -> None:
    """Note whether the current event is what a call has been given."""
    given = (*found,) if isinstance(found, list) else found
    now = outbox.current_event()
    trace.append("current" if type(now) is type(given) and now == given else f"{now!r}")


async def anote_current(found: Any) -> None:
    await asyncio.gather(asyncio.sleep(0), asyncio.to_thread(note_current, found))


@contextmanager
def current_noted(found: Any) -> Iterator[None]:
    note_current(found)
    yield


vars(current_noted)["batch"] = True


@outside_alone
@everywhere
@pytest.mark.parametrize(
    ("listen", "options"),
    [
        (note_current, {}),
        (note_current, {"atomic": True}),
        (note_current, {"batch": 2}),
        (anote_current, {}),
        (anote_current, {"batch": 2}),
    ],
)
def test_what_is_called_in_a_delivery_finds_its_events(
    settings: Any, where: str, listen: Any, options: dict[str, Any]
) -> None:
    settings.OUTBOX = intercepted("current_noted")
    deliver(listen, where, **options)
    assert trace == ["current", "current"]
    assert outbox.current_event() is None


@outside_alone
@everywhere
@either_kind
@pytest.mark.parametrize("options", [{}, {"batch": 2}], ids=str)
def test_a_fallback_finds_its_own_event(
    where: str, good: Any, bad: Any, options: dict[str, Any]
) -> None:
    with listening(bad, retry=ONCE, **options):
        registry.fallback(bad, lambda event, failure: note_current(event))
        deliver_all(where, [{}, {}])
    assert trace == ["current", "current"]
    assert outbox.current_event() is None
