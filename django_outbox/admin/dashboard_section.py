"""A section of the dashboard: a title and one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from django.utils.translation import gettext as _

MAX_ROWS: Final = 5  # rows of a table on the dashboard; all of them are on a page of their own

Cells = Sequence[str]


class Head(NamedTuple):
    """The head of a column."""

    title: str
    is_number: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section with one table, or with a sentence if the table is empty."""

    name: str
    title: str
    columns: Sequence[str]  # a leading # marks a column of numbers; empty: one of buttons
    rows: Sequence[Cells]
    empty: str = ""
    note: str = ""
    needs_attention: bool = False
    is_wide: bool = False
    all_url: str = ""  # the page with all rows
    count: str = ""  # of all rows, if that is known and these are not all

    @property
    def heads(self) -> list[Head]:
        return [Head(each.removeprefix("#"), each.startswith("#")) for each in self.columns]

    @property
    def lines(self) -> list[list[tuple[str, Head]]]:
        heads = self.heads
        return [[*zip(row, heads, strict=True)] for row in self.rows]

    @property
    def all_label(self) -> str:
        return _("All %s") % self.count if self.count else _("All")

    def short(self) -> Section:
        """Return the section with at most ``MAX_ROWS`` rows, and the number of all of them."""
        if len(self.rows) <= MAX_ROWS:
            return self
        count = self.count or str(len(self.rows))
        return replace(self, rows=self.rows[:MAX_ROWS], count=count)
