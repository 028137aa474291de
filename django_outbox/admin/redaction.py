"""Hide the values that OUTBOX["REDACT"] names, anywhere in payload, headers and errors.

Parsing and dumping change nothing else: numbers keep their digits, and repeated keys stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from ..conf import current

MASK: Final = "•••"
CHANGED: Final = f"{MASK} (changed)"  # in a comparison: a hidden value that differs
# What follows a name in plain text: an opened bracket with the rest of its line, a quoted text,
# which may have been cut off, or what precedes the next delimiter, such as "Bearer abc".
VALUE: Final = (
    r"""(['"]?\s*[:=]\s*|['"]\s*,\s*)"""
    r"""([\[{(].*|\w?"(?:[^"\\]|\\.)*(?:"|\Z)|\w?'(?:[^'\\]|\\.)*(?:'|\Z)|[^\n,;&)}\]]+)"""
)
NUMBERED: Final = re.compile(rf"{MASK}(\d*)", re.ASCII)


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


def hide_numbered(value: Any, known: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
    """Return the value with numbered masks, and the hidden values for ``restore``.

    If ``known`` are the hidden values of an earlier version, equal ones keep their numbers, and
    the others become ``CHANGED``.
    """
    secrets: list[Any] = []

    def change(found: Any, path: Path) -> Any:
        if not is_hidden(path):
            return found
        secrets.append(found)
        if not known:
            return f"{MASK}{len(secrets)}"
        same = (n for n, each in enumerate(known, 1) if (type(each), each) == (type(found), found))
        return next((f"{MASK}{number}" for number in same), CHANGED)

    return _transform(value, change), secrets


def restore(value: Any, secrets: Sequence[Any]) -> Any:
    """Put hidden values back; raise ``ValueError`` for a misplaced mask or an unknown number."""

    def change(found: Any, path: Path) -> Any:
        is_text = isinstance(found, str) and not isinstance(found, Number)
        match = NUMBERED.fullmatch(found) if is_text else None
        if match is None:
            return found
        number = int(match[1] or 0)
        if not is_hidden(path) or not 0 < number <= len(secrets):
            raise ValueError(".".join(path))
        return secrets[number - 1]

    return _transform(value, change)


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
