"""What pydantic does not read as it wrote it, and the table of all kinds that do not come back."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, Final, Literal, Union, get_args, get_origin
from typing import get_type_hints as hints_of

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
    "builtin": "is also a dict, list, tuple, str or number, as which it would be written; make it "
    "a class of its own",
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
    "values": "is an enum or a Literal of values that JSON cannot hold; use str, int, bool or None",
    "serializer": "has a serializer of its own, whose text may not be read; use a type that "
    "pydantic writes and reads",
    "config": "has a config with which JSON loses values; leave out",  # with the options' names
    "alien": "has a class that pydantic does not write, or does not read; make it a model, a "
    "dataclass or a list",
}
LAZY: Final = (Iterable, Iterator, Generator, re.Pattern)  # pydantic reads them as something else
LOSSY: Final = ("ser_json_temporal", "json_encoders")  # options with which values change
NATIVE: Final[Mapping[Any, str]] = {
    **{each: each.__name__ for each in (str, int, float, bool)},
    **dict.fromkeys((None, type(None)), "null"),
}


def init_only(cls: Any) -> list[str]:
    """Return the InitVars of a dataclass, of which Python 3.10 cannot resolve the annotations."""
    every = getattr(cls, "__dataclass_fields__", {})
    return [name for name, each in every.items() if "InitVar" in str(each.type)]


def text(where: str, kind: str) -> str:
    return f"{where} {KINDS[kind]}"


def is_enum(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, Enum)  # also Django's, unknown to nodes


def is_model(cls: Any) -> bool:
    return isinstance(cls, type) and hasattr(cls, "model_validate_json")


def in_model(cls: Any, seen: set[Any]) -> Iterator[str]:
    """Yield the faults of a model, or of a dataclass that pydantic has made."""
    if cls in seen:
        return
    seen.add(cls)
    if (
        is_model(cls)
        and not cls.__pydantic_complete__
        and not cls.model_rebuild(raise_errors=False)
    ):
        raise NameError(f"an annotation of {cls.__qualname__} names what is not defined")
    config = cls.model_config if is_model(cls) else cls.__pydantic_config__
    fields_ = cls.model_fields if is_model(cls) else cls.__pydantic_fields__
    read = {name: _read_names(name, info, config) for name, info in fields_.items()}
    yield from _in_whole(cls, config, {str(each) for names in read.values() for each in names})
    for name, info in fields_.items():
        where = f"{cls.__qualname__}.{name}"
        if (info.serialization_alias or name) not in read[name]:
            yield text(where, "alias")
        yield from _in_hint(info.annotation, where, seen, (*info.metadata, info))


def _in_whole(cls: Any, config: Mapping[str, Any], read: set[str]) -> Iterator[str]:
    """Yield the faults of a model that are not in the type of a field."""
    own, keeps = cls.__pydantic_decorators__, config.get("extra") in ("allow", "forbid")
    computed = [(name, each.info.alias or name) for name, each in own.computed_fields.items()]
    found = {
        "private": [*getattr(cls, "__private_attributes__", ())],
        "serializer": [n for each in own.field_serializers.values() for n in each.info.fields],
        "init": _not_stored(cls),
        "computed": [name for name, alias in computed if keeps or alias in read],
    }
    for kind, names in found.items():
        yield from (text(f"{cls.__qualname__}.{name}", kind) for name in names)
    if getattr(cls, "__parameters__", ()):
        yield text(cls.__qualname__, "generic")
    if own.model_serializers:
        yield text(cls.__qualname__, "serializer")
    options = [each for each in LOSSY if config.get(each)]
    if config.get("ser_json_bytes", "utf8") != config.get("val_json_bytes", "utf8"):
        options.append("ser_json_bytes")
    if options:
        yield f"{text(cls.__qualname__, 'config')} {', '.join(options)}"


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
    yield from (text(where, kind) for kind in _marked(hint, marks))
    if cls in (Union, types.UnionType):
        tags = [getattr(each, "discriminator", None) for each in marks]
        is_tagged = any(isinstance(getattr(each, "discriminator", each), str) for each in tags)
        orders = [getattr(each, "union_mode", None) for each in marks]
        if not _are_told_apart(arguments, is_tagged) or "left_to_right" in orders:
            yield text(where, "union")
    elif cls is Literal:
        if any(type(each) not in NATIVE for each in arguments):
            yield text(where, "values")
        return
    elif isinstance(cls, type):
        yield from _in_class(cls, where, seen)
        if cls is hint and getattr(hint, "__parameters__", None):
            yield text(where, "generic")
        if issubclass(cls, Mapping) and arguments:
            kinds = _json_kinds(arguments[0])
            is_literal = get_origin(arguments[0]) is Literal and kinds != {"str"}
            if len(kinds) > 1 or kinds & {"null", "array", "object"} or is_literal:
                yield text(where, "keys")
    for each in arguments:
        yield from _in_hint(each, where, seen)


def _marked(hint: Any, marks: tuple[Any, ...]) -> Iterator[str]:
    """Yield the kinds of the faults that the metadata of a field says."""
    pydantic: Any = sys.modules["pydantic"]
    for each in (hint, *marks):
        if each is pydantic.Json or isinstance(each, pydantic.Json):
            yield "json"
        if isinstance(each, (pydantic.PlainSerializer, pydantic.WrapSerializer)):
            yield "serializer"
        if isinstance(each, pydantic.SkipValidation) and hint not in NATIVE:
            yield "alien"
        if getattr(each, "exclude", None) is True or getattr(each, "exclude_if", None):
            yield "excluded"


def _in_class(cls: Any, where: str, seen: set[Any]) -> Iterator[str]:
    if hasattr(cls, "get_secret_value"):
        yield text(where, "secret")
    elif hasattr(cls, "__pydantic_decorators__"):
        yield from in_model(cls, seen)
    elif is_enum(cls):
        if not issubclass(cls, (str, int)) and any(type(each.value) not in NATIVE for each in cls):
            yield text(where, "values")
    elif is_dataclass(cls) or hasattr(cls, "__total__") or hasattr(cls, "_fields"):
        yield from _in_fields(cls, seen)
    elif cls in LAZY or not _is_known(cls):
        yield text(where, "alien")


def _is_known(cls: Any) -> bool:
    """Return whether pydantic writes and reads a class, and not only lets it pass."""
    pydantic: Any = sys.modules["pydantic"]
    with suppress(pydantic.errors.PydanticSchemaGenerationError):
        return bool(pydantic.TypeAdapter(cls))
    return False


def _in_fields(cls: Any, seen: set[Any]) -> Iterator[str]:
    """Yield the faults of a dataclass, TypedDict or NamedTuple that pydantic reads."""
    if cls in seen:
        return
    seen.add(cls)
    for name in _not_stored(cls):
        yield text(f"{cls.__qualname__}.{name}", "init")
    for name, hint in hints_of(cls, include_extras=True).items():
        if get_origin(hint) is not ClassVar:
            yield from _in_hint(hint, f"{cls.__qualname__}.{name}", seen)


def _not_stored(cls: Any) -> list[str]:
    """Return the fields of a dataclass that pydantic does not store."""
    not_init = [each.name for each in fields(cls) if not each.init] if is_dataclass(cls) else []
    return [*init_only(cls), *not_init]


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
    if cls is Literal or is_enum(cls):
        values = get_args(hint) if cls is Literal else [each.value for each in cls]
        return {NATIVE.get(type(each), "str") for each in values}
    if cls in (Union, types.UnionType):
        return {kind for each in get_args(hint) for kind in _json_kinds(each)}
    if cls in NATIVE:
        return {NATIVE[cls]}
    if cls in (Any, object) or not isinstance(cls, type):
        return set()
    if getattr(cls, "__pydantic_root_model__", False):
        return _json_kinds(cls.model_fields["root"].annotation)  # type: ignore[attr-defined]
    if issubclass(cls, (Sequence, AbstractSet)) and not issubclass(cls, (str, bytes)):
        return {"array"}
    if issubclass(cls, Mapping) or is_model(cls) or is_dataclass(cls):
        return {"object"}
    return {"str"}
