"""The registry of listeners, and routing: which listeners get an event."""

from __future__ import annotations

import base64
import difflib
import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from typing import Any, Final, ParamSpec, Protocol, TypeVar

from ..conf import until_changed
from ..events import LANE_LENGTH, UNROUTED_LANE, declared, type_text
from ..exceptions import ListenerAlreadyRegistered, seconds
from ..queue_settings import DEFAULT_QUEUE
from .callables import is_async, location, redefines
from .options import TITLE_LENGTH, Batching, batching, check_queue, former_titles
from .retry import RetryPolicy, checked

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
T_co = TypeVar("T_co", covariant=True)


class _Any(Enum):
    ANY = "*"

    def __repr__(self) -> str:
        return "ANY"


ANY: Final = _Any.ANY  # listen to every aggregate type


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A registered callable and its options."""

    call: Callable[..., Any]
    event_type: str  # a type, or a pattern with *
    aggregate_type: str | _Any
    name: str  # empty: the only unnamed listener of its types
    retry: RetryPolicy | None  # None: OUTBOX["RETRY"]
    timeout: float | None  # seconds
    atomic: bool
    queue: str = DEFAULT_QUEUE
    payload_type: type | None = None  # the @event class of its payload, if any
    fallback: Callable[..., Any] | None = None  # called once when this one has failed for good
    batching: Batching | None = None  # set if it gets many events in one call
    patterns: tuple[str, ...] = ()  # given: several types or patterns; the title is the name then
    check: Callable[[], None] | None = None  # raises while what it sends to cannot be reached
    formerly: tuple[str, ...] = ()  # titles that it had before it was renamed
    is_async: bool = field(init=False)
    is_awaited: bool = field(init=False)  # on the event loop
    types: tuple[str, ...] = field(init=False)  # and patterns that it listens to
    title: str = field(init=False)  # its name in the rows of events: a deploy should not change it
    digest: str = field(init=False)  # of the title, as rows and their ids have it
    lane: str = field(init=False)  # the listeners of a lane see the events of a key in one order
    titles: tuple[str, ...] = field(init=False)  # its own first, then the former ones

    def __post_init__(self) -> None:
        kind = "" if self.aggregate_type is ANY else f"[{self.aggregate_type}]"
        title = self.name if self.patterns else f"{self.event_type}{kind} {self.name}".rstrip()
        put = object.__setattr__.__get__(self)
        put("title", title)
        put("titles", (title, *self.formerly))
        put("digest", digest(title))
        put("lane", lane_of(self.name))
        put("types", self.patterns or (self.event_type,))
        put("is_async", is_async(self.call))
        put("is_awaited", self.is_async and not self.atomic)

    @property
    def where(self) -> str:
        """Return name and location: ``shop.listeners.reserve_stock (…/listeners.py:12)``."""
        return location(self.call)


class Listening(Protocol[P, T_co]):
    """A registered function: callable as before, with a decorator for its fallback."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co:
        """Call the function, as before."""

    def fallback(self, call: F, /) -> F:
        """Register ``call(event, failure)``, called once when the listener has failed for good."""


_listeners: dict[str, Listener] = {}  # by title
_caches: list[Any] = []  # of functions that depend on the registry
conflicts: list[str] = []  # duplicate registrations found while apps load; for the checks


def digest(text: str) -> str:
    """Return twelve characters that stand for a title in the rows of events, and in their ids."""
    found = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return base64.b32encode(found).decode()[:12].lower()


def lane_of(name: str) -> str:
    """Return the lane of the listeners with this name; those without one share a lane."""
    is_usual = len(name) <= LANE_LENGTH and ":" not in name and name[:1] != UNROUTED_LANE
    return name if is_usual else f"#{digest(name)}"


def listener(
    event_type: Any,
    *,
    aggregate_type: Any = ANY,
    name: str = "",
    retry: RetryPolicy | None = None,
    timeout: float | None = None,
    atomic: bool = False,
    queue: str = DEFAULT_QUEUE,
    batch: int | None = None,
    within: float | timedelta = 0.0,
    per_key: int = 1,
    formerly: Sequence[str] = (),
) -> Callable[[Callable[P, T_co]], Listening[P, T_co]]:
    """Register a function, method, callable object or ``async def`` for an event type.

    - ``event_type``: a type, a pattern (``"order.*"``, ``"*"``), or a class declared with
      ``@event``; ``event.payload`` is then an instance of it.
    - ``aggregate_type``, ``name``: a further listener of the same types needs a name of its own.
    - ``retry``: a retry policy; default: ``OUTBOX["RETRY"]``.
    - ``timeout``: seconds; default: ``OUTBOX["LISTENER_TIMEOUT"]``. It cancels an ``async def``
      (a wait for ``ASYNC_CONNECTIONS`` does not count). The worker abandons any other's thread.
    - ``atomic``: commit what the listener writes together with the event's DONE.
    - ``queue``: one of ``OUTBOX["QUEUES"]``; its threads call the listener.
    - ``batch``: each call gets a list of 1 to ``batch`` events (500 at most), and returns None or
      a list with one answer for each: what a listener may return, or an exception.
    - ``within``: seconds (1 at most) that the first event of a batch may wait for more.
    - ``per_key``: how many consecutive events of one key a batch may contain.
    - ``formerly``: titles that the listener had before it was renamed; it gets what waits for them.

    ``@that_listener.fallback`` registers what is called once when the listener has failed for good.

    Raises ``ListenerAlreadyRegistered`` for a second listener with the same types and name, or with
    the same former title, and ``ValueError`` for a type or an option that cannot work.

    Example::

        @outbox.listener("order.placed", timeout=10)
        def reserve_stock(event):
            print(event.payload)
    """
    if retry is not None:
        checked(retry)
    if not isinstance(name, str):
        raise ValueError(f"name is {name!r}; expected a str.")
    if timeout is not None and seconds(timeout, of="timeout") == 0:
        raise ValueError("timeout is 0; expected seconds above zero, or None.")
    check_queue(queue)
    options = batching(batch, within, per_key)
    former = former_titles(formerly)
    kind = aggregate_type if aggregate_type is ANY else type_text(aggregate_type, "aggregate_type")
    types, payload_type = _types(event_type)

    def register(call: Callable[P, T_co]) -> Listening[P, T_co]:
        for each in types:
            add(
                Listener(
                    call=call,
                    event_type=each,
                    aggregate_type=kind,
                    name=name,
                    retry=retry,
                    timeout=timeout,
                    atomic=atomic,
                    queue=queue,
                    payload_type=payload_type,
                    batching=options,
                    formerly=former,
                )
            )
        _attach_fallback(call)
        return call  # type: ignore[return-value]  # it has a fallback now

    return register


def add(new: Listener) -> None:
    """Register a listener; one that a shell or a reload defines again replaces the former.

    ``ListenerAlreadyRegistered`` if the title is taken, ``ValueError`` if it does not fit.
    """
    if len(new.title) > TITLE_LENGTH:
        raise ValueError(
            f"The title of {new.where} has {len(new.title)} characters: its types and its name. "
            f"At most {TITLE_LENGTH} fit; give it a shorter name=."
        )
    if (old := _listeners.get(new.title)) and not redefines(new.call, old.call):
        what = "listeners with the title" if new.name else "unnamed listeners for"
        raise ListenerAlreadyRegistered(
            f"Two {what} {new.title!r}: {new.where} and {old.where}. Give one of them a name= of "
            "its own if both should run."
        )
    _listeners.pop(new.title, None)
    _check_former_titles(new)
    _listeners[new.title] = new
    _clear_route_caches()


def _check_former_titles(new: Listener) -> None:
    if new.title in new.formerly:
        raise ValueError(
            f"formerly of {new.where} has {new.title!r}, which is its title; expected titles that "
            "it no longer has."
        )
    for old in listeners():
        # Those of one decorator, for the types of a class, share their former titles.
        is_same = (old.call, old.name, old.formerly) == (new.call, new.name, new.formerly)
        if taken := ({*new.titles} & {*old.titles}) - ({*new.formerly} if is_same else set()):
            raise ListenerAlreadyRegistered(
                f"{new.where} and {old.where} both have the title {min(taken)!r}, one of them in "
                "formerly=. Expected it of one listener, which gets the events of that title."
            )


def fallback(of: Callable[..., Any], call: F) -> F:
    """Register ``call`` as the fallback of ``of``, for every event type that ``of`` listens to.

    Raises ``ListenerAlreadyRegistered`` if ``of`` has a fallback already.
    """
    mine = [each for each in listeners() if each.call == of]
    for old in (each.fallback for each in mine if each.fallback):
        raise ListenerAlreadyRegistered(
            f"{location(call)} and {location(old)} are both the fallback of {location(of)}. "
            "Expected one; have it call the other."
        )
    for each in mine:
        _listeners[each.title] = replace(each, fallback=call)
    _clear_route_caches()
    return call


def remove(call: Callable[..., Any]) -> None:
    """Remove every registration of a callable; for tests."""
    for each in listeners():
        if each.call == call:
            del _listeners[each.title]
    _clear_route_caches()


def _clear_route_caches() -> None:
    for each in _caches:
        each.cache_clear()


def _attach_fallback(call: Any) -> None:
    """Set the decorator ``fallback`` on a callable, unless the name is taken or cannot be set."""
    mine = functools.partial(fallback, call)
    if isinstance(getattr(call, "fallback", mine), functools.partial):
        with suppress(AttributeError):
            call.fallback = mine


def until_registered(function: F) -> F:
    """Cache the results of a function until a listener is registered or the settings change."""
    _caches.append(cached := until_changed(function))
    return cached


def listeners() -> tuple[Listener, ...]:
    """Return all listeners in the order of their registration."""
    return tuple(_listeners.values())


@until_registered
def route(aggregate_type: str, event_type: str) -> tuple[Listener, ...]:
    """Return an event's listeners, most specific first: one unnamed listener, all named ones."""
    matches = sorted(
        (each for each in listeners() if _matches(each, aggregate_type, event_type)),
        key=_generality,
    )
    unnamed = [each for each in matches if not each.name]
    return tuple(each for each in matches if each.name or each is unnamed[0])


@until_registered
def by_title(title: str | None) -> Listener | None:
    """Return the listener that has this title, or had it before; None if this process has none."""
    return next((each for each in listeners() if title in each.titles), None)


@until_registered
def titles_of(title: str | None) -> tuple[str, ...]:
    """Return all titles of the listener with this title, or only the title if it is not known."""
    if found := by_title(title):
        return found.titles
    return () if title is None else (title,)


@until_registered
def lanes() -> tuple[str, ...]:
    """Return the lanes in which the events of a key can wait, as far as this process knows."""
    former = [
        lane_of(title if each.patterns else title.partition(" ")[2])
        for each in listeners()
        for title in each.formerly
    ]
    now = (each.lane for each in listeners())
    return tuple(dict.fromkeys(["", *now, *former, UNROUTED_LANE]))


def similar_types(event_type: str) -> list[str]:
    """Return registered event types like this one, nearest first."""
    known = sorted({pattern for each in listeners() for pattern in each.types})
    return difflib.get_close_matches(event_type, known, n=3, cutoff=0) or known[:3]


def _types(given: Any) -> tuple[tuple[str, ...], type | None]:
    """Return the event types to listen to, and the ``@event`` class if one was given."""
    if not isinstance(given, type):
        return (type_text(given, "event_type"),), None
    if found := declared(given):
        return (found.event_type, *found.aliases), given
    raise ValueError(
        f"{given!r} is not an event type; expected a str or a class declared with @event."
    )


def _matches(given: Listener, aggregate_type: str, event_type: str) -> bool:
    if given.aggregate_type is not ANY and given.aggregate_type != aggregate_type:
        return False
    return any(
        each == event_type or ("*" in each and type_pattern(each).fullmatch(event_type) is not None)
        for each in given.types
    )


@functools.lru_cache(maxsize=4096)
def type_pattern(text: str) -> re.Pattern[str]:
    """Compile a pattern in which only ``*`` is special; brackets, question marks are literal."""
    return re.compile(".*".join(map(re.escape, text.split("*"))), re.DOTALL)


def _generality(each: Listener) -> tuple[int, int, int]:
    """Return a sort key: exact pair, then exact type of ANY, then patterns, most literal first."""
    is_pattern = "*" in each.event_type
    literal = len(each.event_type) - each.event_type.count("*") if is_pattern else 0
    return int(is_pattern), -literal, int(each.aggregate_type is ANY)
