"""``@event``: declare the type, key and headers of events on the class of their payload."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from django.conf import settings as django_settings

from ..exceptions import InvalidEvent, PayloadError
from . import kinds, validation
from .pydantic_kinds import is_enum
from .validation import GLOBAL

C = TypeVar("C", bound=type)
if TYPE_CHECKING:  # Event alone means Event[Any]; at run time, only Python 3.13 knows defaults
    from typing_extensions import TypeVar as WithDefault

    Payload_co = WithDefault("Payload_co", covariant=True, default=Any)
else:
    Payload_co = TypeVar("Payload_co", covariant=True)
Path = str | Callable[[Any], Any]  # "order.id", or a callable that gets the payload

DECLARATION_ATTRIBUTE = "__outbox_event__"  # attribute that holds a class's declaration

classes: dict[str, tuple[type, ...]] = {}  # declared classes by event type and alias
_unresolved: set[type] = set()  # those with an annotation that was not defined when declared


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
        put("event_type", validation.type_text(self.event_type, "event_type"))
        put("aggregate_type", validation.type_text(self.aggregate_type, "aggregate_type"))
        aliases: Any = self.aliases
        if not isinstance(aliases, (tuple, list)):  # a str would pass as an iterable of letters
            raise InvalidEvent(f"aliases is {aliases!r}; expected a tuple of event types.")
        put("aliases", tuple(validation.type_text(each, "event_type") for each in aliases))
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
            name = getattr(path, "__qualname__", repr(path))
            raise InvalidEvent(
                f"The {what} of {self.event_type!r} is None, taken from {name}; expected a str, an "
                "int or a UUID."
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
    Struct, an attrs class or a pydantic model, of fields that come back from JSON equal.

    ``key``, ``aggregate_id`` and the values of ``headers`` are attribute paths (``"order.id"``) or
    callables that get the instance. ``aliases`` are former names of the type: events stored under
    them are still read.

    Raises ``InvalidEvent`` for values that no event can have, and for a class of which a field
    would be lost or changed, or could not be read.

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
        try:
            found = None if _has_own_serializer() else kinds.fault(cls)
        except NameError:  # a class further down, perhaps
            _unresolved.add(cls)
        else:
            _require_readable(cls, found)
        setattr(cls, DECLARATION_ATTRIBUTE, declaration)
        for name in (declaration.event_type, *declaration.aliases):
            others = (each for each in classes.get(name, ()) if _path(each) != _path(cls))
            classes[name] = (*others, cls)
        return cls

    return declare


def declared(cls: Any) -> Declaration | None:
    """Return the ``@event`` declaration of this class itself, not of a base class, or None."""
    return vars(cls).get(DECLARATION_ATTRIBUTE) if isinstance(cls, type) else None


def class_fault(cls: type) -> str | None:
    """Return why a declared class would not come back from JSON equal; None if it would."""
    if _has_own_serializer():
        return None
    try:
        return kinds.fault(cls)
    except NameError as error:
        return kinds.undefined(cls, error)


def check_payload(
    event_type: str, payload: Any, text: str, loads: Callable[..., Any], *, is_compared: bool
) -> None:
    """Raise ``InvalidEvent`` for a payload that no class declared for its type could be read from.

    An instance of such a class is read only if ``is_compared``: it must then come back equal.
    """
    if not (declared_for := classes.get(event_type)):
        return
    cls = type(payload)
    if cls not in declared_for:
        _require_fit(event_type, declared_for, text, loads)
        return
    if cls in _unresolved:
        _require_readable(cls, class_fault(cls))
        _unresolved.discard(cls)
    if is_compared:
        _require_fit(event_type, (cls,), text, loads)
        if found := difference(payload, loads(text, cls)):
            raise InvalidEvent(
                f"{cls.__qualname__} would not come back from JSON as it was written: {found}. "
                "Expected a value of the field's type; correct the value or the annotation."
            )


def _require_fit(
    event_type: str, candidates: tuple[type, ...], text: str, loads: Callable[..., Any]
) -> None:
    faults = []
    for each in candidates:
        try:
            loads(text, each)
        except PayloadError as error:
            faults.append(str(error))
        else:
            return
    raise InvalidEvent(
        f"The payload of {event_type!r} does not fit the class declared for it: "
        f"{'; '.join(faults)}. Expected an instance of the class, or the fields of one."
    )


def difference(written: Any, read: Any, where: str = "") -> str | None:
    """Return the field in which what was read differs from what was written; None if in none."""
    ours, theirs = _parts(written), _parts(read)
    is_same_kind = isinstance(read, dict if isinstance(written, dict) else type(written))
    if ours is None or theirs is None:
        if written is read or (ours is theirs and written == read):
            return None
    elif is_same_kind and ours.keys() == theirs.keys():
        found = (difference(ours[step], theirs[step], f"{where}{step}") for step in ours)
        return next(filter(None, found), None)
    return (
        f"{where.lstrip('.') or 'the payload'} (written as {type(written).__qualname__}, "
        f"read as {type(read).__qualname__})"
    )


def _parts(value: Any) -> dict[str, Any] | None:
    """Return what a value consists of, also one of a class that does not compare its instances."""
    found, cls = kinds.parts(value), type(value)
    if found is None and getattr(cls, "__eq__", None) is object.__eq__ and not is_enum(cls):
        return {f".{name}": inner for name, inner in getattr(value, "__dict__", {}).items()} or None
    return found


def _require_readable(cls: type, found: str | None) -> None:
    if found:
        raise InvalidEvent(
            f"@event was put on {cls.__qualname__}, which would not come back from JSON as it was "
            f"written: {found}."
        )


def _has_own_serializer() -> bool:
    """Return whether ``SERIALIZER`` is set; only the default one's abilities are known here."""
    options = getattr(django_settings, "OUTBOX", None) if django_settings.configured else None
    return bool(isinstance(options, Mapping) and options.get("SERIALIZER"))


def _path(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


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
