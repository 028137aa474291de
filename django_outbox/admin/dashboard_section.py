"""A section of the dashboard: a title and one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

Cells = Sequence[str]


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
    count: str = ""  # of all rows, if these are not all

    @property
    def heads(self) -> list[tuple[str, bool]]:
        """Return the titles of the columns, and whether they have numbers."""
        return [(each.removeprefix("#"), each.startswith("#")) for each in self.columns]

    @property
    def lines(self) -> list[list[tuple[str, tuple[str, bool]]]]:
        return [[*zip(row, self.heads, strict=True)] for row in self.rows]

    def short(self, most: int) -> Section:
        """Return the section with at most so many rows, and the number of all of them."""
        if len(self.rows) <= most:
            return self
        return replace(self, rows=self.rows[:most], count=self.count or str(len(self.rows)))
