"""A section of the dashboard: a title and one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Cells = Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section with one table, or with a sentence if the table is empty."""

    name: str
    title: str
    columns: Sequence[str]  # a leading # marks a column of numbers
    rows: Sequence[Cells]
    empty: str
    note: str = ""
    needs_attention: bool = False

    @property
    def heads(self) -> list[tuple[str, bool]]:
        return [(each.removeprefix("#"), each.startswith("#")) for each in self.columns]

    @property
    def lines(self) -> list[list[tuple[str, bool]]]:
        numbers = [is_number for _title, is_number in self.heads]
        return [[*zip(row, numbers, strict=True)] for row in self.rows]
