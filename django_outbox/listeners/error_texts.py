"""Normalise errors, so that those of one cause are equal: ids and numbers become ``#``."""

from __future__ import annotations

import re
from typing import Final

READ_LENGTH: Final = 500  # characters of an error that are read
LENGTH: Final = 200  # characters of a normalised error, at most; of the column ``cause``

# Numbers and ids, with the letters that may belong to a hexadecimal id.
IDS: Final = re.compile("[0-9a-f]*[0-9][0-9a-fA-Zx]*", re.ASCII)
# A quoted text; an apostrophe inside a word does not end it, the end of the text does.
QUOTED: Final = re.compile(
    r"""(?<!\w)[bBrRuU]?(?:'([^']*(?:'(?=\w)[^']*)*)(?:'|\Z)|"([^"]*(?:"(?=\w)[^"]*)*)(?:"|\Z))"""
)
# Names in code, host names and URLs stay in their quotes, because they tell causes apart.
NAME: Final = re.compile(
    r"[A-Za-z_][A-Za-z_.-]*|[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}(?::0+)?|https?://\S*"
)
# Also a status, such as '503 Service Unavailable'.
SENTENCE: Final = re.compile(r"(?:\S+ +){3,}\S+ *|0(?: [A-Z][A-Za-z]*)+")
QUERY: Final = re.compile(r"""\?[\w.%~-]+=[^\s'"<>)]*""")  # of a URL
UUID: Final = re.compile(r"(?:0|[a-f]{8})(?:-(?:0|[a-f]{4})){3}-(?:0|[a-f]{12})")
NUMBER: Final = re.compile(r"0+(?:[.,-]0+)*")
LIST: Final = re.compile(r"#(?:[,;] ?#)+")


def normalised(text: str | None) -> str:
    """Return the first line of an error with ``#`` in place of numbers, ids and quoted values.

    Equal results mean the same cause. Quoted names, such as of an attribute or a host, stay, and
    so do quoted sentences.

    Example::

        assert normalised("ValueError: order 17 of 'Ann Lee'") == "ValueError: order # of #"
    """
    line = IDS.sub("0", (text or "")[:READ_LENGTH].partition("\n")[0])
    line = UUID.sub("#", QUERY.sub("?#", _without_values(line)))
    return LIST.sub("#", NUMBER.sub("#", line))[:LENGTH].strip()


def error_class(text: str | None) -> str:
    """Return the part before the message: ``ValueError`` for ``ValueError: no``."""
    return (text or "").partition("\n")[0].partition(":")[0].strip()


def _without_values(line: str) -> str:
    return QUOTED.sub(_quoted, line)


def _quoted(found: re.Match[str]) -> str:
    inner = found[1] if found[1] is not None else found[2]
    if NAME.fullmatch(inner):
        return found[0]
    return f'"{_without_values(inner)}"' if SENTENCE.fullmatch(inner) else "#"
