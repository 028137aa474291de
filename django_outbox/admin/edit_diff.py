"""What an edit of an event changes, line by line; hidden values stay hidden."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any, Final, NamedTuple

from ..conf import current
from . import redaction

CONTEXT: Final = 3  # unchanged lines shown before and after a change
MAX_COMPARED: Final = 2000  # lines that are compared; more differ as a whole
MAX_SHOWN: Final = 1000  # lines of a diff that are shown


class Line(NamedTuple):
    kind: str  # "old", "new", "same", or "gap" for lines that are left out
    text: str


@dataclass(frozen=True, slots=True)
class Diff:
    """The changed lines of one text, with some unchanged ones around them."""

    lines: list[Line]
    is_cut: bool

    @property
    def is_empty(self) -> bool:
        return not self.lines


def compare(before: str | None, after: str | None) -> Diff:
    """Return the difference of two stored texts, as the admin shows them."""
    old, secrets = _shown(before or "", [])
    new, _ = _shown(after or "", secrets)
    if old == new and (before or "") != (after or "") and old == [redaction.MASK]:
        new = [redaction.CHANGED]
    lines = [*_lines(old, new)]
    return Diff(lines[:MAX_SHOWN], len(lines) > MAX_SHOWN)


def _shown(text: str, known: Sequence[Any]) -> tuple[list[str], list[Any]]:
    """Return a text's lines, and its hidden values, numbered as the ``known`` ones if equal."""
    try:
        value, secrets = redaction.hide_numbered(redaction.parse(text), known)
    except (ValueError, RecursionError):  # not JSON: hidden values cannot be found in it
        return [redaction.MASK] if text and current().REDACT else text.splitlines(), []
    return redaction.dump(value, "  ").splitlines(), secrets


def _lines(old: Sequence[str], new: Sequence[str]) -> Iterator[Line]:
    start = _common(old, new)
    end = _common(old[start:][::-1], new[start:][::-1])
    if start == len(old) == len(new):
        return
    first, last = max(start - CONTEXT, 0), max(end - CONTEXT, 0)
    old, new = old[first : len(old) - last], new[first : len(new) - last]
    if first:
        yield Line("gap", "…")
    yield from _changes(old, new, start - first, end - last)
    if last:
        yield Line("gap", "…")


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many lines are equal at the start of both."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _changes(old: Sequence[str], new: Sequence[str], start: int, end: int) -> Iterator[Line]:
    """Compare the lines between those that are equal at the start and at the end."""
    if len(old) + len(new) > MAX_COMPARED:
        yield from (Line("same", each) for each in old[:start])
        yield from (Line("old", each) for each in old[start : len(old) - end])
        yield from (Line("new", each) for each in new[start : len(new) - end])
        yield from (Line("same", each) for each in new[len(new) - end :])
        return
    groups = SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(CONTEXT)
    for number, group in enumerate(groups):
        if number:
            yield Line("gap", "…")
        for tag, low, high, new_low, new_high in group:
            if tag == "equal":
                yield from (Line("same", each) for each in old[low:high])
                continue
            yield from (Line("old", each) for each in old[low:high])
            yield from (Line("new", each) for each in new[new_low:new_high])
