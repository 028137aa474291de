"""``@event``: declare the type, key and headers of events on the class of their payload."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..exceptions import InvalidEvent
from . import validation
from .validation import GLOBAL, LENGTHS

C = TypeVar("C", bound=type)
Path = str | Callable[[Any], Any]  # "order.id", or a callable that gets the payload

DECLARATION_ATTRIBUTE = "__outbox_event__"  # attribute that holds a class's declaration


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What is declared once for all events of a type; validated when created."""

    event_type: str
    key: Path | None = None
    headers: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    aggregate_type: str = GLOBAL
    aggregate_id: Path | None = None
    aliases: tuple[str, ...] = ()  # former names of the type

    def __post_init__(self) -> None:
        put = object.__setattr__.__get__(self)
        put("event_type", _checked("event_type", self.event_type))
        put("aggregate_type", _checked("aggregate_type", self.aggregate_type))
        aliases: Any = self.aliases
        if not isinstance(aliases, (tuple, list)):  # a str would pass as an iterable of letters
            raise InvalidEvent(f"aliases is {aliases!r}; expected a tuple of event types.")
        put("aliases", tuple(_checked("event_type", each) for each in aliases))
        put("headers", dict(self.headers or {}))
        for what, path in {"key": self.key, "aggregate_id": self.aggregate_id}.items():
            if path is not None:
                check_path(what, path)
        for name, path in self.headers.items():
            check_path(f"headers[{name!r}]", path)

    def fields(self, source: Any) -> dict[str, Any]:
        """Return the fields of an ``Event`` that the declaration derives from its payload.

        Raises ``InvalidEvent`` for a path that leads nowhere, and if key or aggregate id is None.
        """
        found: dict[str, Any] = {"event_type": self.event_type}
        if self.key is not None:
            found["key"] = self._identity("key", self.key, source)
        if self.headers:
            texts = {n: resolve_path(f"headers[{n!r}]", p, source) for n, p in self.headers.items()}
            found["headers"] = {
                n: validation.identity(t) for n, t in texts.items() if t is not None
            }
        if self.aggregate_type != GLOBAL or self.aggregate_id is not None:
            found["aggregate_type"] = self.aggregate_type
        if self.aggregate_id is not None:
            found["aggregate_id"] = self._identity("aggregate_id", self.aggregate_id, source)
        return found

    def _identity(self, what: str, path: Path, source: Any) -> Any:
        value = validation.identity(resolve_path(what, path, source))
        if value is None:
            raise InvalidEvent(
                f"The {what} of {self.event_type!r} is None, taken from {_path_text(path)}; "
                "expected a str, an int or a UUID."
            )
        return value


def event(
    event_type: Any,
    *,
    key: Path | None = None,
    headers: Mapping[str, Path] | None = None,
    aggregate_type: Any = GLOBAL,
    aggregate_id: Path | None = None,
    aliases: tuple[Any, ...] = (),
) -> Callable[[C], C]:
    """Declare a class as the payload of an event type.

    The serializer must be able to write and read the class: by default a dataclass, a msgspec
    Struct, an attrs class or a pydantic model.

    ``key``, ``aggregate_id`` and the values of ``headers`` are attribute paths (``"order.id"``) or
    callables that get the instance. ``aliases`` are former names of the type: events stored under
    them are still read.

    Raises ``InvalidEvent`` for values that no event can have.

    Example::

        @outbox.event("order.placed", key="order", headers={"currency": "currency"})
        class OrderPlaced(msgspec.Struct):  # or a dataclass, an attrs class, a pydantic model
            order: int
            currency: str = "EUR"


        with transaction.atomic():
            outbox.write(OrderPlaced(order=7))
    """
    declaration = Declaration(
        event_type=event_type,
        key=key,
        headers=headers or {},
        aggregate_type=aggregate_type,
        aggregate_id=aggregate_id,
        aliases=aliases,
    )

    def declare(cls: C) -> C:
        if not isinstance(cls, type):
            raise InvalidEvent(f"@event was put on {cls!r}; expected a class.")
        setattr(cls, DECLARATION_ATTRIBUTE, declaration)
        return cls

    return declare


def declared(cls: Any) -> Declaration | None:
    """Return the ``@event`` declaration of this class itself, not of a base class, or None."""
    return vars(cls).get(DECLARATION_ATTRIBUTE) if isinstance(cls, type) else None


def _checked(column: str, value: Any) -> str:
    return validation.exact_text(column, validation.type_name(value, column), most=LENGTHS[column])


def check_path(what: str, path: Any) -> None:
    """Raise ``InvalidEvent`` unless ``path`` is an attribute path or a callable."""
    if callable(path) or (isinstance(path, str) and all(map(str.isidentifier, path.split(".")))):
        return
    raise InvalidEvent(f"{what} is {path!r}; expected an attribute path or a callable.")


def resolve_path(what: str, path: Path, source: Any) -> Any:
    """Return the value that a path leads to, through attributes or items of mappings."""
    if not isinstance(path, str):
        return path(source)
    value = source
    for step in path.split("."):
        try:
            value = value[step] if isinstance(value, Mapping) else getattr(value, step)
        except (AttributeError, KeyError) as error:
            raise InvalidEvent(
                f"{what} comes from {path!r}, but {type(value).__name__} has no {step!r}. Correct "
                "the path, or the object."
            ) from error
    return value


def _path_text(path: Path) -> str:
    return repr(path) if isinstance(path, str) else getattr(path, "__qualname__", repr(path))
