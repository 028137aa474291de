"""Rules about how large the project may be, and the report of code lines per folder.

A code line has a token that is no comment and no part of a docstring. A limit is lowered when the
project has shrunk; who has to raise one says in the commit what it is worth.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.rules import Rule, Text

CODE_LINES = {
    "django_outbox": 22_371,
    "django_outbox/admin": 1_981,
    "django_outbox/relays": 2_214,
    "django_outbox/sql": 2_052,
}
MODULES = 174  # of the package, migrations among them
TEST_LINES = 73_497  # of all Python files below tests, comments and blank lines among them
PAGES, WORDS = 48, 64_956  # below docs
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Return the number of lines with a token, without comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - docstrings)


def texts(root: Path, folder: str, suffix: str) -> list[Text]:
    return [Text.read(root, path) for path in sorted((root / folder).rglob(f"*{suffix}"))]


def by_folder(root: Path) -> tuple[Counter[str], Counter[str]]:
    """Return the modules and the code lines of each folder of the package."""
    count, lines = Counter[str](), Counter[str]()
    for module in texts(root, "django_outbox", ".py"):
        folder = "/".join(module.path.split("/")[:2][: module.path.count("/")])
        count[folder] += 1
        lines[folder] += code_lines(module.text)
    return count, lines


def report(root: Path) -> Iterator[str]:
    """Yield a line for each folder of the package, and for all of it."""
    count, lines = by_folder(root)
    for folder in sorted(count):
        yield f"{folder:28} {count[folder]:4} modules {lines[folder]:7,} code lines"
    yield f"{'sum':28} {count.total():4} modules {lines.total():7,} code lines"


def the_package_is_small(root: Path) -> Iterator[str]:
    count, lines = by_folder(root)
    for folder, most in CODE_LINES.items():
        found = lines.total() if folder == "django_outbox" else lines[folder]
        if found > most:
            yield f"{folder}:1: {found:,} code lines, more than {most:,}; take something away"
    if count.total() > MODULES:
        yield f"django_outbox:1: {count.total()} modules, more than {MODULES}; take one away"


def the_tests_are_small(root: Path) -> Iterator[str]:
    if (found := sum(text.text.count("\n") for text in texts(root, "tests", ".py"))) > TEST_LINES:
        yield f"tests:1: {found:,} lines, more than {TEST_LINES:,}; take something away"


def the_documentation_is_small(root: Path) -> Iterator[str]:
    pages = texts(root, "docs", ".md")
    if len(pages) > PAGES:
        yield f"docs:1: {len(pages)} pages, more than {PAGES}; put two into one"
    if (words := sum(len(page.text.split()) for page in pages)) > WORDS:
        yield f"docs:1: {words:,} words, more than {WORDS:,}; take something away"


RULES: tuple[Rule, ...] = (the_package_is_small, the_tests_are_small, the_documentation_is_small)
