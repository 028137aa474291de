"""Hide the values that OUTBOX["REDACT"] names, anywhere in payload, headers and errors.

Parsing and dumping change nothing else: numbers keep their digits, and repeated keys stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final, NoReturn

from ..conf import current

MASK: Final = "•••"
# What follows a name in plain text: an opened bracket with the rest of its line, a quoted text,
# which may have been cut off, or what precedes the next delimiter, such as "Bearer abc".
VALUE: Final = (
    r"""(['"]?\s*[:=]\s*|['"]\s*,\s*)"""
    r"""([\[{(].*|\w?"(?:[^"\\]|\\.)*(?:"|\Z)|\w?'(?:[^'\\]|\\.)*(?:'|\Z)|[^\n,;&)}\]]+)"""
)


class Number(str):
    """A JSON number, kept as its original text."""

    __slots__ = ()


class Pairs(list[tuple[str, Any]]):
    """A JSON object as pairs, in the original order and with repeated keys."""


Path = tuple[str, ...]  # the keys that lead to a value
Change = Callable[[Any, Path], Any]


def parse(text: str) -> Any:
    """Parse JSON text; raise ``ValueError`` (also for NaN) or ``RecursionError``."""
    return json.loads(
        text, parse_int=Number, parse_float=Number, parse_constant=_refuse, object_pairs_hook=Pairs
    )


def dump(value: Any, indent: str = "", *, line: str = "") -> str:
    """Return a parsed value as JSON text, on several lines if there is an ``indent``."""
    inner = f"{line}{indent}" if indent else ""
    if isinstance(value, Number):
        return str.__str__(value)
    if isinstance(value, Pairs):
        colon = ": " if indent else ":"
        parts = [f"{_scalar(k)}{colon}{dump(v, indent, line=inner or line)}" for k, v in value]
        return _bracketed("{}", parts, inner, line)
    if isinstance(value, list):
        return _bracketed("[]", [dump(v, indent, line=inner or line) for v in value], inner, line)
    return _scalar(value)


def is_hidden(path: Path) -> bool:
    """Return whether the path ends with a name or dotted path of REDACT, ignoring case."""
    dotted = f".{'.'.join(path)}".casefold()
    return bool(path) and any(dotted.endswith(f".{each.casefold()}") for each in current().REDACT)


def hide_in_text(text: str) -> str:
    """Return plain text, such as an error, with a mask in place of what follows a hidden name.

    It knows ``name=value``, ``name: value``, ``'name', value`` and the same with quotes; if in
    doubt, it hides more. Text has no paths, so only the last part of a dotted path counts.
    """
    if not (names := {each.rpartition(".")[2] for each in current().REDACT}):
        return text
    either = "|".join(map(re.escape, sorted(names)))
    return re.sub(rf"(?<!\w)({either}){VALUE}", rf"\1\2{MASK}", text, flags=re.IGNORECASE)


def hide(value: Any) -> Any:
    """Return the parsed value with a mask in place of each hidden value."""
    return _transform(value, lambda found, path: MASK if is_hidden(path) else found)


def _transform(value: Any, change: Change, path: Path = ()) -> Any:
    changed = change(value, path)
    if changed is not value:
        return changed
    if isinstance(value, Pairs):
        return Pairs((k, _transform(v, change, (*path, k))) for k, v in value)
    if isinstance(value, list):  # its items share its path
        return [_transform(v, change, path) for v in value]
    return value


def _scalar(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _bracketed(marks: str, parts: list[str], inner: str, line: str) -> str:
    if not parts or not inner:
        return f"{marks[0]}{','.join(parts)}{marks[1]}"
    return f"{marks[0]}\n{inner}" + f",\n{inner}".join(parts) + f"\n{line}{marks[1]}"


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
