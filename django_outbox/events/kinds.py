"""Which classes come back from JSON as they were written: a table of the kinds that do not.

The default serializer reads models of pydantic with pydantic, all else with msgspec. Neither is
asked whether a value survives: both accept classes that lose one. So each kind that does not
survive is in the table. pydantic and attrs are recognised by their attributes, never imported.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Final, get_origin
from typing import get_type_hints as hints_of

import msgspec
from msgspec import inspect as nodes

from .pydantic_kinds import KINDS, in_model, init_only, is_enum, is_model, text

NODES: Final[Mapping[type, str]] = {  # what msgspec has a type for and our JSON has not
    nodes.BytesType: "bytes",
    nodes.ByteArrayType: "bytes",
    nodes.RawType: "raw",
}
TEXT_KEYS = (nodes.StrType, nodes.IntType, nodes.FloatType, nodes.BoolType, nodes.AnyType)
# Keys that msgspec makes text of, and the standard library's encoder refuses.
TIME_KEYS = (nodes.DateTimeType, nodes.DateType, nodes.TimeType, nodes.TimeDeltaType)
STRUCT_KEYS = (*TEXT_KEYS, *TIME_KEYS, nodes.UUIDType)
BUILTIN: Final = (dict, list, tuple, str, int, float)  # classes that the encoder knows itself


def fault(cls: Any) -> str | None:
    """Return why an instance of a class would not come back equal, by its field; None if it would.

    Raises ``NameError`` while an annotation names what is not defined.
    """
    if is_model(cls):
        return next(in_model(cls, set()), None)
    try:
        node = nodes.type_info(cls)
        msgspec.json.Decoder(cls)  # refuses unions that type_info lets pass
    except NameError:
        raise
    except Exception as error:  # noqa: BLE001 - msgspec has no error of its own for it
        return f"{_refused_field(cls)} {KINDS['unreadable']}: {error}"
    if isinstance(node, nodes.CustomType):
        return text(cls.__qualname__, "bare")
    return next(_in_node(node, cls.__qualname__, set(), is_plain=True), None)


def undefined(cls: type, error: NameError) -> str:
    """Return the text of a ``NameError`` that ``fault`` raised, with the field if it is known."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format, get_annotations

        annotations = get_annotations(cls, format=Format.STRING)
    else:
        annotations = inspect.get_annotations(cls)
    found = [name for name, hint in annotations.items() if error.name and error.name in str(hint)]
    where = ".".join([cls.__qualname__, *found[:1]])
    return f"{where}: {error}; expected what its module defines, not only for type checkers"


def _refused_field(cls: Any) -> str:
    """Return the field because of which msgspec refuses a class, if it is one of the class."""
    for name in init_only(cls):
        return f"{cls.__qualname__}.{name}"
    for name, hint in hints_of(cls, include_extras=True).items():
        try:
            if get_origin(hint) is not ClassVar and hint is not ClassVar:
                msgspec.json.Decoder(hint)
        except Exception:  # noqa: BLE001 - as above
            return f"{cls.__qualname__}.{name}"
    return str(cls.__qualname__)


def _in_node(node: Any, where: str, seen: set[Any], *, is_plain: bool) -> Iterator[str]:
    """Yield the faults of a type; ``is_plain``: only dataclasses and containers are around it."""
    if (id(node), is_plain) in seen:
        return
    seen.add((id(node), is_plain))
    found = NODES.get(type(node))
    if isinstance(node, nodes.CustomType):
        if is_model(node.cls):
            yield from in_model(node.cls, seen)
        elif not is_enum(node.cls) and not _takes_what_is_read(node.cls):
            found = "foreign"
    elif isinstance(node, (nodes.SetType, nodes.FrozenSetType)) and is_plain:
        found = "set"
    elif hasattr(node, "key_type") and not _is_key(node.key_type, is_plain):
        found = "keys"
    elif isinstance(node, nodes.DataclassType) and issubclass(
        get_origin(node.cls) or node.cls, BUILTIN
    ):
        found = "builtin"
    if found:
        yield text(where, found)
    yield from _in_parts(node, where, seen, is_plain)


def _in_parts(node: Any, where: str, seen: set[Any], is_plain: bool) -> Iterator[str]:
    cls = getattr(node, "cls", None)
    if getattr(cls, "__parameters__", ()):
        yield text(where, "generic")
    is_attrs = hasattr(cls, "__attrs_attrs__")
    is_plain = is_plain and not is_attrs and not isinstance(node, nodes.StructType)
    for name in node.__struct_fields__:
        part = getattr(node, name)
        for each in part if isinstance(part, tuple) else (part,):
            if isinstance(each, nodes.Field):
                at = f"{getattr(cls, '__qualname__', cls)}.{each.name}"
                if is_attrs and each.name.startswith("_"):
                    yield text(at, "private")
                yield from _in_node(each.type, at, seen, is_plain=is_plain)
            elif isinstance(each, nodes.Type):
                yield from _in_node(each, where, seen, is_plain=is_plain)


def _takes_what_is_read(cls: Any) -> bool:
    """Return whether JSON values are instances of a class: ``object``, ``Iterable`` and others."""
    with suppress(TypeError):  # a Protocol
        return any(issubclass(each, get_origin(cls) or cls) for each in BUILTIN)
    return False


def _is_key(node: Any, is_plain: bool) -> bool:
    if is_enum(getattr(node, "cls", None)):
        return not is_plain or issubclass(node.cls, (str, int))
    if isinstance(node, nodes.LiteralType):
        return len({type(each) for each in node.values}) == 1
    return isinstance(node, TEXT_KEYS if is_plain else STRUCT_KEYS)


def parts(value: Any) -> dict[str, Any] | None:
    """Return what a value consists of, by the steps to it from the value; None for a single one."""
    if isinstance(value, dict):
        return {
            f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]": inner
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return {f"[{at}]": inner for at, inner in enumerate(value)}
    names, cls = None, type(value)
    if is_dataclass(cls):
        names = [each.name for each in fields(cls)]
    elif is_model(cls):
        names = [*cls.model_fields, *cls.__private_attributes__, "model_extra"]
    elif isinstance(value, msgspec.Struct):
        names = [*cls.__struct_fields__]
    elif hasattr(cls, "__attrs_attrs__"):
        names = [each.name for each in cls.__attrs_attrs__]
    return None if names is None else {f".{name}": getattr(value, name, None) for name in names}
