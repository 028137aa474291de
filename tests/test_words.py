"""Words that we do not use, in the pages and in the package's texts, comments and templates."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import django_outbox

pytestmark = pytest.mark.any_database

PACKAGE = Path(django_outbox.__file__).parent
ROOT = PACKAGE.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md",
         *sorted((ROOT / "docs").rglob("*.md"))]  # fmt: skip
MODULES = sorted(PACKAGE.rglob("*.py"))
TEMPLATES = sorted((PACKAGE / "templates").rglob("*.html"))

# What not to write, as a pattern, and what to write instead.
INSTEAD = {
    r"rescue lots?|lots of events": "recovery batch",
    r"by and by": "gradually",
    r"whoever|whomever": "if you …, a user who …",
    r"somebody|nobody|no one": "a process, no listener, a person",
    r"ears?": "listener connection",
    r"rings?|ringing|rung": "notify",
    r"hears?|heard": "receives",
    r"stands? in(?! for)": "is in",
    r"belongs? into": "goes in",
    r"c[ao]mes? of": "results from; outcome",
    r"a row of errors": "consecutive errors",
    r"(?<!there )(?:is|are|was|were) no (?!longer|more|less)[a-z]+": "is not a",
    r"the dead block": "dead events block the stream",
    r"(?:a|the|each|every|next|thorough|at|of) looks?": "poll, scan",
    r"looks? from the beginning": "full scan",
    r"walks?|walking": "scan",
    r"in hand": "in flight, leased",
    r"patience|keeps? (?:its|their) pace": "timeout, throttle",
    r"bears?|borne": "supports",
    r"(?:is|are|was|were) told(?! to)": "reported, logged",
    r"deeds?": "action",
    r"galler(?:y|ies)|bedrock|plumbing": "package, layer, module",
    r"beside": "while, alongside, compared with",
    r"shows? (?:itself|themselves)": "is alive, appears",
}
BANNED = {
    re.compile(rf"\b(?:{each})\b(?!\()", re.IGNORECASE): word for each, word in INSTEAD.items()
}  # a word before a parenthesis is a function


def found(text: str) -> list[str]:
    """Return each banned word of a text, with the words around it and what to write instead."""
    text = re.sub(r"(`+).*?\1", "``", " ".join(text.split()))  # names in code
    return [
        f"{text[max(0, each.start() - 30) : each.end() + 20]!r}: write {word!r}"
        for pattern, word in BANNED.items()
        for each in pattern.finditer(text)
    ]


def prose_of_page(text: str) -> str:
    """Return a page without code blocks, and without what is measured by ``tests/benchmarks``."""
    text = re.sub(r"<!-- benchmarks: .*?<!-- end of benchmarks -->", "", text, flags=re.DOTALL)
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


def prose_of_module(text: str) -> Iterator[str]:
    """Yield docstrings, messages and comments; a string without a space is a name in code."""
    for each in ast.walk(ast.parse(text)):
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and " " in each.value:
            yield each.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_a_page_has_no_word_that_we_do_not_use(path: Path) -> None:
    assert found(prose_of_page(path.read_text())) == []


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_module_has_no_word_that_we_do_not_use(path: Path) -> None:
    assert [hit for text in prose_of_module(path.read_text()) for hit in found(text)] == []


@pytest.mark.parametrize("path", TEMPLATES, ids=relative)
def test_a_template_has_no_word_that_we_do_not_use(path: Path) -> None:
    assert found(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    ['"""Wakes whoever waits."""', 'raise ValueError("Nobody waits here.")',
     'say(f"{name} stands in for nobody.")', "x = 1  # somebody has it"],
    ids=["docstring", "message", "formatted", "comment"],
)  # fmt: skip
def test_each_kind_of_text_in_a_module_is_searched(text: str) -> None:
    assert [hit for prose in prose_of_module(text) for hit in found(prose)]


def test_code_is_not_searched() -> None:
    assert found(prose_of_page("Call `ear()`, or\n\n```python\nclass Ear: ...\n```\n")) == []
    assert [*prose_of_module('METHODS = ("ring", "ear")')] == []
    assert found("Expected a class with ring(connection) and ear().") == []
    assert found("The ear rings.") != []
