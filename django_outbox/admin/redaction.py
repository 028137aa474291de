"""Hide the values that OUTBOX["REDACT"] names, anywhere in payload, headers and errors.

Nothing else changes: numbers keep their digits.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, Final

import msgspec

from ..conf import current

MASK: Final = "•••"
# What follows a name in plain text: an opened bracket with the rest of its line, a quoted text,
# which may have been cut off, or what precedes the next delimiter, such as "Bearer abc".
VALUE: Final = (
    r"""(['"]?\s*[:=]\s*|['"]\s*,\s*)"""
    r"""([\[{(].*|\w?"(?:[^"\\]|\\.)*(?:"|\Z)|\w?'(?:[^'\\]|\\.)*(?:'|\Z)|[^\n,;&)}\]]+)"""
)


DECODER: Final = msgspec.json.Decoder(float_hook=Decimal)
ENCODER: Final = msgspec.json.Encoder(decimal_format="number")


def hide_in_json(text: str) -> str:
    """Return JSON on several lines, with a mask in place of each hidden value.

    Raises ``ValueError`` or ``RecursionError`` if the text cannot be decoded.
    """
    return msgspec.json.format(ENCODER.encode(_hidden(DECODER.decode(text))), indent=2).decode()


def _hidden(value: Any, *path: str) -> Any:
    """Return a value with its hidden values masked; ``path`` has the keys that lead to it."""
    if is_hidden(path):
        return MASK
    if isinstance(value, dict):
        return {key: _hidden(each, *path, key) for key, each in value.items()}
    if isinstance(value, list):  # its items share its path
        return [_hidden(each, *path) for each in value]
    return value


def is_hidden(path: tuple[str, ...]) -> bool:
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
