"""Which classes come back from JSON as they were written: a table of the kinds that do not.

The default serializer reads models of pydantic with pydantic, all else with msgspec. Neither is
asked whether a value survives: both accept classes that lose one. So each kind that does not
survive is in the table. pydantic and attrs are recognised by their attributes, never imported.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, Final, Literal, Union, get_args, get_origin
from typing import get_type_hints as hints_of

import msgspec
from msgspec import inspect as nodes

# Why a field does not come back equal, and what to do about it.
KINDS: Final[Mapping[str, str]] = {
    "bytes": "holds bytes, which JSON cannot; use a str, in base64 say",
    "raw": "is of a type that is not written as JSON; use the type that the text has",
    "set": "is a set, which is not written from a dataclass; use a list, a tuple or a Struct",
    "keys": "has keys that JSON cannot hold or tell apart; use str or int",
    "generic": "is generic and its parameters are open; declare a subclass that names them",
    "foreign": "has a class that is neither of JSON nor a dataclass, Struct, attrs class or "
    "pydantic model; use one of these",
    "bare": "is not a dataclass, Struct, attrs class or pydantic model; put @event above the "
    "decorator that makes it one",
    "private": "is private and would not be stored; give it a public name",
    "unreadable": "has a type that cannot be read",  # with msgspec's reason
    # Of pydantic's models:
    "secret": "is a secret and would be stored as asterisks; store a reference to it",
    "excluded": "is excluded and would not be stored; include it, or remove it from the class",
    "alias": "is written by a name by which it is not read; give it one alias for both",
    "computed": "is computed, so it is stored, and extra= refuses or keeps it when it is read; "
    "use a property, or extra='ignore'",
    "json": "is pydantic.Json, written as a value and read as text; use the type of the value",
    "init": "is an InitVar or has init=False, so pydantic does not store it; make it a plain field",
    "union": "may have types that JSON cannot tell apart; use one of them, or a discriminator",
    "enum": "is an enum with values that JSON cannot hold; use str or int values",
    "alien": "has a class that pydantic does not write; make it a model or a dataclass",
}
NODES: Final[Mapping[type, str]] = {  # what msgspec has a type for and our JSON has not
    nodes.BytesType: "bytes",
    nodes.ByteArrayType: "bytes",
    nodes.RawType: "raw",
}
TEXT_KEYS = (nodes.StrType, nodes.IntType, nodes.FloatType, nodes.BoolType, nodes.AnyType)
# Keys that msgspec makes text of, and the standard library's encoder refuses.
TIME_KEYS = (nodes.DateTimeType, nodes.DateType, nodes.TimeType, nodes.TimeDeltaType)
STRUCT_KEYS = (*TEXT_KEYS, *TIME_KEYS, nodes.UUIDType)
NATIVE: Final[Mapping[Any, str]] = {
    **{each: each.__name__ for each in (str, int, float, bool)},
    **dict.fromkeys((None, type(None)), "null"),
}


def fault(cls: Any) -> str | None:
    """Return why an instance of a class would not come back equal, by its field; None if it would.

    Raises ``NameError`` while an annotation names what is not defined.
    """
    if is_model(cls):
        return next(_in_model(cls, set()), None)
    try:
        node = nodes.type_info(cls)
        msgspec.json.Decoder(cls)  # refuses unions that type_info lets pass
    except NameError:
        raise
    except Exception as error:  # noqa: BLE001 - msgspec has no error of its own for it
        return f"{_refused_field(cls)} {KINDS['unreadable']}: {error}"
    if isinstance(node, nodes.CustomType):
        return _text(cls.__qualname__, "bare")
    return next(_in_node(node, cls.__qualname__, set(), is_plain=True), None)


def undefined(cls: type, error: NameError) -> str:
    """Return the text of a ``NameError`` that ``fault`` raised, with the field if it is known."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format, get_annotations

        annotations = get_annotations(cls, format=Format.STRING)
    else:
        annotations = inspect.get_annotations(cls)
    found = [name for name, hint in annotations.items() if error.name and error.name in str(hint)]
    return f"{'.'.join([cls.__qualname__, *found[:1]])}: {error}"


def _refused_field(cls: Any) -> str:
    """Return the field because of which msgspec refuses a class, if it is one of the class."""
    for name in _init_only(cls):
        return f"{cls.__qualname__}.{name}"
    for name, hint in hints_of(cls, include_extras=True).items():
        try:
            if get_origin(hint) is not ClassVar and hint is not ClassVar:
                msgspec.json.Decoder(hint)
        except Exception:  # noqa: BLE001 - as above
            return f"{cls.__qualname__}.{name}"
    return str(cls.__qualname__)


def _init_only(cls: Any) -> list[str]:
    """Return the InitVars of a dataclass, of which Python 3.10 cannot resolve the annotations."""
    every = getattr(cls, "__dataclass_fields__", {})
    return [name for name, each in every.items() if "InitVar" in str(each.type)]


def _text(where: str, kind: str) -> str:
    return f"{where} {KINDS[kind]}"


# --- what msgspec reads ---------------------------------------------------------------------------


def _in_node(node: Any, where: str, seen: set[Any], *, is_plain: bool) -> Iterator[str]:
    """Yield the faults of a type; ``is_plain``: only dataclasses and containers are around it."""
    if (id(node), is_plain) in seen:
        return
    seen.add((id(node), is_plain))
    found = NODES.get(type(node))
    if isinstance(node, nodes.CustomType):
        if is_model(node.cls):
            yield from _in_model(node.cls, seen)
        elif not is_enum(node.cls) and not _takes_what_is_read(node.cls):
            found = "foreign"
    elif isinstance(node, (nodes.SetType, nodes.FrozenSetType)) and is_plain:
        found = "set"
    elif hasattr(node, "key_type") and not _is_key(node.key_type, is_plain):
        found = "keys"
    if found:
        yield _text(where, found)
    yield from _in_parts(node, where, seen, is_plain)


def _in_parts(node: Any, where: str, seen: set[Any], is_plain: bool) -> Iterator[str]:
    cls = getattr(node, "cls", None)
    if getattr(cls, "__parameters__", ()):
        yield _text(where, "generic")
    is_attrs = hasattr(cls, "__attrs_attrs__")
    is_plain = is_plain and not is_attrs and not isinstance(node, nodes.StructType)
    for name in node.__struct_fields__:
        part = getattr(node, name)
        for each in part if isinstance(part, tuple) else (part,):
            if isinstance(each, nodes.Field):
                at = f"{getattr(cls, '__qualname__', cls)}.{each.name}"
                if is_attrs and each.name.startswith("_"):
                    yield _text(at, "private")
                yield from _in_node(each.type, at, seen, is_plain=is_plain)
            elif isinstance(each, nodes.Type):
                yield from _in_node(each, where, seen, is_plain=is_plain)


def is_enum(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, Enum)  # also Django's, unknown to nodes


def _takes_what_is_read(cls: Any) -> bool:
    """Return whether JSON values are instances of a class: ``object``, ``Iterable`` and others."""
    return any(issubclass(each, get_origin(cls) or cls) for each in (str, int, float, list, dict))


def _is_key(node: Any, is_plain: bool) -> bool:
    if is_enum(getattr(node, "cls", None)):
        return not is_plain or issubclass(node.cls, (str, int))
    if isinstance(node, nodes.LiteralType):
        return len({type(each) for each in node.values}) == 1
    return isinstance(node, TEXT_KEYS if is_plain else STRUCT_KEYS)


# --- what pydantic reads --------------------------------------------------------------------------


def field_names(value: Any) -> list[str] | None:
    """Return the names of an instance's fields; None for an instance of any other class."""
    cls = type(value)
    if is_dataclass(cls):
        return [each.name for each in fields(cls)]
    if is_model(cls):
        return [*cls.model_fields, *cls.__private_attributes__, "model_extra"]
    if isinstance(value, msgspec.Struct):
        return [*cls.__struct_fields__]
    if hasattr(cls, "__attrs_attrs__"):
        return [each.name for each in cls.__attrs_attrs__]
    return None


def is_model(cls: Any) -> bool:
    return isinstance(cls, type) and hasattr(cls, "model_validate_json")


def _in_model(cls: Any, seen: set[Any]) -> Iterator[str]:
    if cls in seen:
        return
    seen.add(cls)
    if not cls.__pydantic_complete__ and not cls.model_rebuild(raise_errors=False):
        raise NameError(f"an annotation of {cls.__qualname__} names what is not defined")
    if getattr(cls, "__parameters__", ()):
        yield _text(cls.__qualname__, "generic")
    for name in cls.__private_attributes__:
        yield _text(f"{cls.__qualname__}.{name}", "private")
    if cls.model_config.get("extra") in ("allow", "forbid"):
        for name in cls.__pydantic_decorators__.computed_fields:
            yield _text(f"{cls.__qualname__}.{name}", "computed")
    for name, info in cls.model_fields.items():
        where = f"{cls.__qualname__}.{name}"
        if info.exclude:
            yield _text(where, "excluded")
        if (info.serialization_alias or name) not in _read_names(name, info, cls.model_config):
            yield _text(where, "alias")
        yield from _in_hint(info.annotation, where, seen, (*info.metadata, info))


def _read_names(name: str, info: Any, config: Mapping[str, Any]) -> list[Any]:
    alias = info.validation_alias
    if alias is None or not config.get("validate_by_alias", True):
        return [name]
    by_name = config.get("populate_by_name") or config.get("validate_by_name")
    return [*getattr(alias, "choices", [alias]), *([name] if by_name else [])]


def _in_hint(hint: Any, where: str, seen: set[Any], marks: tuple[Any, ...] = ()) -> Iterator[str]:
    """Yield the faults of an annotation that pydantic reads; ``marks``: its field's metadata."""
    hint, marks = _bare(hint, marks)
    arguments: Any = get_args(hint)
    cls = get_origin(hint) or hint
    pydantic: Any = sys.modules["pydantic"]
    if any(each is pydantic.Json or isinstance(each, pydantic.Json) for each in (hint, *marks)):
        yield _text(where, "json")
    if cls in (Union, types.UnionType):
        is_tagged = any(getattr(each, "discriminator", None) for each in marks)
        if not _are_told_apart(arguments, is_tagged):
            yield _text(where, "union")
    elif cls is Literal:
        return
    elif isinstance(cls, type):
        yield from _in_class(cls, where, seen)
        if cls is hint and getattr(hint, "__parameters__", None):
            yield _text(where, "generic")
        if issubclass(cls, Mapping) and arguments:
            kinds = _json_kinds(arguments[0])
            if len(kinds) > 1 or kinds & {"null", "array", "object"}:
                yield _text(where, "keys")
    for each in arguments:
        yield from _in_hint(each, where, seen)


def _in_class(cls: Any, where: str, seen: set[Any]) -> Iterator[str]:
    if hasattr(cls, "get_secret_value"):
        yield _text(where, "secret")
    elif is_model(cls):
        yield from _in_model(cls, seen)
    elif is_enum(cls):
        if not issubclass(cls, (str, int)) and any(type(each.value) not in NATIVE for each in cls):
            yield _text(where, "enum")
    elif is_dataclass(cls) or hasattr(cls, "__total__") or hasattr(cls, "_fields"):
        yield from _in_fields(cls, seen)
    elif not _is_known(cls):
        yield _text(where, "alien")


def _is_known(cls: Any) -> bool:
    """Return whether pydantic writes and reads a class, and not only lets it pass."""
    pydantic: Any = sys.modules["pydantic"]
    try:
        pydantic.TypeAdapter(cls)
    except pydantic.errors.PydanticSchemaGenerationError:
        return False
    return True


def _in_fields(cls: Any, seen: set[Any]) -> Iterator[str]:
    """Yield the faults of a dataclass, TypedDict or NamedTuple that pydantic reads."""
    if cls in seen:
        return
    seen.add(cls)
    not_init = [each.name for each in fields(cls) if not each.init] if is_dataclass(cls) else []
    for name in (*_init_only(cls), *not_init):
        yield _text(f"{cls.__qualname__}.{name}", "init")
    for name, hint in hints_of(cls, include_extras=True).items():
        if get_origin(hint) is not ClassVar:
            yield from _in_hint(hint, f"{cls.__qualname__}.{name}", seen)


def _bare(hint: Any, marks: tuple[Any, ...] = ()) -> tuple[Any, tuple[Any, ...]]:
    """Return an annotation without ``Annotated``, NewType and alias, and the marks it had."""
    while True:
        if get_origin(hint) is Annotated:
            marks += hint.__metadata__
            hint = hint.__origin__
        elif (inner := getattr(hint, "__supertype__", getattr(hint, "__value__", None))) is None:
            return hint, marks
        else:
            hint = inner


def _are_told_apart(members: tuple[Any, ...], is_tagged: bool) -> bool:
    """Return whether the JSON of a union's member shows which of them it is."""
    taken: dict[str, bool] = {}
    for each in members:
        is_native = each in NATIVE or get_origin(each) is Literal
        for kind in _json_kinds(each) - ({"object"} if is_tagged else set()):
            if kind in taken and not (is_native and taken[kind]):
                return False
            taken[kind] = is_native
    return True


def _json_kinds(hint: Any) -> set[str]:
    """Return the kinds of JSON value that an annotation's values are written as."""
    hint, _ = _bare(hint)
    cls: Any = get_origin(hint) or hint
    if cls is Literal:
        return {NATIVE.get(type(each), "str") for each in get_args(hint)}
    if cls in (Union, types.UnionType):
        return {kind for each in get_args(hint) for kind in _json_kinds(each)}
    if cls in NATIVE:
        return {NATIVE[cls]}
    if cls in (Any, object) or not isinstance(cls, type):
        return set()
    if issubclass(cls, Enum):
        return {NATIVE.get(type(each.value), "str") for each in cls}
    if getattr(cls, "__pydantic_root_model__", False):
        return _json_kinds(cls.model_fields["root"].annotation)  # type: ignore[attr-defined]
    if issubclass(cls, (Sequence, AbstractSet)) and not issubclass(cls, (str, bytes)):
        return {"array"}
    if issubclass(cls, Mapping) or is_model(cls) or is_dataclass(cls):
        return {"object"}
    return {"str"}
