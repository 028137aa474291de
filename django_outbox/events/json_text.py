"""Encode, check and decode the JSON text of payloads and headers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from decimal import Decimal
from json import JSONEncoder
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from django.utils.functional import Promise

from ..exceptions import InvalidEvent, PayloadError, PayloadTooLarge
from .kinds import fault, parts, undefined
from .validation import NO_HEADERS

T = TypeVar("T")
Loads = Callable[..., Any]

MAX_NESTING = 100
NOT_JSON = (bytes, bytearray, memoryview, set, frozenset)  # msgspec would write text and lists


def encode(payload: Any) -> str:
    """Return the payload as JSON text; ``InvalidEvent`` names the field that JSON cannot express.

    The standard library's encoder rejects NaN and Infinity; msgspec would write null.
    ``check_text`` refuses what a database cannot store.
    """
    try:
        return _encoder.encode(payload)
    except RecursionError:
        raise _too_deep() from None
    except Exception as error:  # of a property or a serializer of the class, too
        raise InvalidEvent(
            f"{_faulty_path(payload)} cannot be written as JSON: {error}. Expected JSON values, "
            "dates, UUIDs, Decimals, enums or dataclasses of these."
        ) from error


def decode(text: str, type_: Any = None) -> Any:
    """Decode JSON text, to an instance of ``type_`` if given; raise ``PayloadError`` on failure."""
    value = _read(_decoder, text)
    return value if type_ is None else fit(value, type_)


def check(text: str) -> None:
    """Raise ``PayloadError`` for what ``decode`` cannot read, in a third of its time."""
    _read(_checker, text)


def _read(decoder: msgspec.json.Decoder[Any], text: str, what: str = "JSON") -> Any:
    try:
        return decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError) as error:
        raise PayloadError(f"The stored {what} cannot be decoded: {error}") from error


def fit(payload: Any, type_: type[T]) -> T:
    """Return a decoded payload as an instance of a class; ``PayloadError`` names class and field.

    Fields that the class does not have are ignored. pydantic models validate themselves.
    """
    given: Any = type_
    name = given.__qualname__ if isinstance(given, type) else given  # a union shows its members
    try:
        if (validate := getattr(type_, "model_validate_json", None)) is not None:
            return validate(encode(payload))  # type: ignore[no-any-return]
        try:
            return msgspec.convert(payload, type_, str_keys=True, dec_hook=_load_model)
        except msgspec.ValidationError:  # not as we write it: numbers may be text
            return msgspec.convert(payload, type_, strict=False, dec_hook=_load_model)
    except Exception as error:  # noqa: BLE001 - whatever the class raises, a retry would too
        raise PayloadError(f"{name}: {_reason(type_, error)}") from None


def _load_model(type_: Any, value: Any) -> Any:
    """Read a pydantic model inside another class; msgspec adds the path to a ``ValueError``."""
    if not hasattr(type_, "model_validate_json"):
        return value  # msgspec checks that it is an instance
    try:
        return fit(value, type_)
    except PayloadError as error:
        raise ValueError(str(error)) from None


def _reason(type_: Any, error: Exception) -> str:
    """Return why a payload could not be read, with the field, and without quoting the payload."""
    if hasattr(error, "errors"):  # pydantic's text quotes it
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        return "; ".join(": ".join([*map(str, each["loc"]), each["msg"]]) for each in faults)
    if isinstance(error, msgspec.ValidationError):
        return str(error)
    if isinstance(error, NameError) and isinstance(type_, type):
        return undefined(type_, error)
    with suppress(TypeError, NameError):
        if isinstance(type_, type) and (found := fault(type_)):
            return found
    return f"{type(error).__name__}: {error}"


def encode_headers(headers: Mapping[str, str], *, most: int) -> str | None:
    """Return headers as JSON text, None without any; ``PayloadTooLarge`` above ``most`` bytes."""
    if not headers:
        return None
    text = msgspec.json.encode({**headers})
    if len(text) > most:
        raise PayloadTooLarge(
            f"The headers have {len(text)} bytes; at most {most} are allowed. Headers are for "
            "short notes about an event; put the rest into the payload, or store it elsewhere."
        )
    return text.decode()


def decode_headers(text: str | None) -> Mapping[str, str]:
    """Return stored headers; NULL, empty text and JSON ``null`` mean that there are none."""
    if not text or text == "null":
        return NO_HEADERS
    return MappingProxyType(_read(_headers_decoder, text, "headers"))


def check_text(text: Any, *, most: int) -> None:
    """Raise ``InvalidEvent`` for text too large, nested too deeply, or refused by a database."""
    if not isinstance(text, str):
        raise InvalidEvent(f"The serializer made {type(text).__name__} of the payload, not str.")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidEvent(
            f"The payload holds a lone surrogate ({error.reason}), which no database stores. "
            "Expected valid Unicode text."
        ) from None
    if size > most:
        raise PayloadTooLarge(
            f"The payload has {size} bytes; at most {most} are allowed. Store the large part "
            'elsewhere and send its address, or raise OUTBOX["MAX_PAYLOAD_BYTES"].'
        )
    if "\0" in text:  # JSON escapes it; another serializer may not
        raise InvalidEvent("The payload's text holds a NUL character, which PostgreSQL refuses.")
    if text.count("[") + text.count("{") > MAX_NESTING and _nesting(text) > MAX_NESTING:
        raise _too_deep()


def _faulty_path(value: Any, path: str = "payload", above: tuple[Any, ...] = ()) -> str:
    """Return the path of the innermost value that the encoder refuses: ``payload.lines[2].price``.

    ``above`` are the values that this one is in.
    """
    if len(above) < MAX_NESTING and not any(value is each for each in above):
        for step, inner in (parts(value) or {}).items():
            try:
                _encoder.encode(inner)
            except Exception:  # noqa: BLE001 - as in encode
                return _faulty_path(inner, path + step, (*above, value))
    return path


def _default(value: Any) -> Any:
    """Convert one level of a value; the encoder calls again for what is inside."""
    if isinstance(value, Promise):  # a lazy translation
        return str(value)
    if isinstance(value, NOT_JSON):
        raise TypeError(f"{type(value).__name__} has no place in JSON")
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError(f"{value!r} has no place in JSON")
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    kept = (bytes, bytearray, memoryview, Decimal)
    return msgspec.to_builtins(value, builtin_types=kept, enc_hook=_dump_model)


def _dump_model(value: Any) -> Any:
    """Convert a pydantic model, which msgspec does not support."""
    dump = getattr(type(value), "model_dump", None)
    if dump is None:
        raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")
    return dump(value, mode="json", by_alias=True)


_encoder = JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_default)

_decoder = msgspec.json.Decoder()
_checker = msgspec.json.Decoder(msgspec.Raw)
_headers_decoder = msgspec.json.Decoder(dict[str, str])


def _too_deep() -> InvalidEvent:
    return InvalidEvent(f"The payload is nested deeper than {MAX_NESTING} levels. Flatten it.")


def _nesting(text: str) -> int:
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", re.sub(r'"(?:[^"\\]|\\.)*"', "", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest
