"""Rules about the text of the repository, checked by ``python -m tests.rules``.

A rule is a function that takes the repository's directory and yields a line for each violation:
``path:line: what is wrong; what to do``. ``tests/test_rules.py`` breaks the text in one place for
each rule, and fails if the rule does not notice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Rule = Callable[[Path], Iterator[str]]


@dataclass(frozen=True)
class Text:
    """A file of the repository, which can name the line of a position in it."""

    path: str  # from the repository's directory
    text: str

    @classmethod
    def read(cls, root: Path, path: str | Path) -> Text:
        full = root / path
        return cls(full.relative_to(root).as_posix(), full.read_text(encoding="utf-8"))

    def fault(self, position: int, message: str) -> str:
        """Return a violation of a rule at a position."""
        return f"{self.path}:{self.text.count(chr(10), 0, position) + 1}: {message}"

    def section(self, heading: str, *, level: int = 2) -> Text:
        """Return the page with only what is below a heading; every line keeps its number.

        It ends at the next heading of the same level. Without such a heading it is empty.
        """
        start = re.search(rf"^{re.escape(heading)}", self.text, re.MULTILINE)
        if not start:
            return Text(self.path, "")
        after = re.compile(rf"^#{{1,{level}}} ", re.MULTILINE)
        end = after.search(self.text, self.text.find("\n", start.end()))
        lines = "\n" * self.text.count("\n", 0, start.start())
        return Text(self.path, lines + self.text[start.start() : end.start() if end else None])

    def names(self, pattern: str) -> Iterator[tuple[int, str]]:
        """Yield the position and the first group of each match; ``^`` begins a line."""
        for found in re.finditer(pattern, self.text, re.MULTILINE):
            yield found.start(), found[1]


def modules(root: Path) -> list[Text]:
    """Return the package's modules, except migrations."""
    paths = sorted((root / "django_outbox").rglob("*.py"))
    return [Text.read(root, path) for path in paths if "migrations" not in path.parts]


def markdown(root: Path) -> list[Text]:
    """Return the README, the changelog, the page for contributors and the documentation."""
    top = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
    return [
        *(Text.read(root, name) for name in top),
        *(Text.read(root, path) for path in sorted((root / "docs").rglob("*.md"))),
    ]
