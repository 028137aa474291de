"""Words that we do not use, in the pages and in the package's texts, comments and templates."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.rules import Rule, Text, markdown

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
MEASURED = re.compile(r"<!-- benchmarks: .*?<!-- end of benchmarks -->", re.DOTALL)
BLOCK = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+).*?\1", re.DOTALL)


def words_of_pages(root: Path) -> Iterator[str]:
    """A page has no word that we do not use; code blocks and measured figures are left out."""
    for page in markdown(root):
        prose = MEASURED.sub(blank, page.text)
        for position, message in banned(BLOCK.sub(blank, prose)):
            yield page.fault(position, message)


def words_of_templates(root: Path) -> Iterator[str]:
    """A template of the admin has no word that we do not use."""
    for path in sorted((root / "django_outbox" / "templates").rglob("*.html")):
        page = Text.read(root, path)
        for position, message in banned(page.text):
            yield page.fault(position, message)


def words_of_modules(root: Path) -> Iterator[str]:
    """A docstring, message or comment of the package has no word that we do not use."""
    for path in sorted((root / "django_outbox").rglob("*.py")):
        module = Text.read(root, path)
        for line, text in texts(module.text):
            for position, message in banned(text):
                yield f"{module.path}:{line + text.count(chr(10), 0, position)}: {message}"


RULES: list[Rule] = [words_of_pages, words_of_templates, words_of_modules]


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield docstrings, messages and comments; a string without a space is a name in code."""
    for each in ast.walk(ast.parse(source)):
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and " " in each.value:
            yield each.lineno, each.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def banned(text: str) -> Iterator[tuple[int, str]]:
    """Yield the position of each banned word, and what to write instead."""
    text = CODE.sub(lambda found: "`" * len(found[0]), text)  # names in code
    positions: list[int] = []
    for word in re.finditer(r"\S+", text):
        positions.extend(range(word.start(), word.end() + 1))
    squeezed = " ".join(text.split())  # a phrase may go on in the next line
    for pattern, instead in BANNED.items():
        for found in pattern.finditer(squeezed):
            yield positions[found.start()], f"{found[0]!r} is not our word; write {instead!r}"


def blank(found: re.Match[str]) -> str:
    """Return as many characters and lines without a word."""
    return re.sub(r"[^\n]", " ", found[0])
