"""The page of the Python API in the reference, made from signatures and docstrings.

``python -m tests.api_reference`` rewrites what is between the markers of each chapter; a rule fails
if that would change the page. What is outside the markers is written by hand.

A docstring is prose. Three forms in it have a meaning here: a list of ``- ``name``: …`` becomes a
table of arguments, a paragraph that begins with ``Raises`` names the errors, and what follows
``Example::`` is the example. ``tests.api_entries`` says which names are public, and holds the text
of those that cannot have a docstring.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import django
from django.db.models import QuerySet

from tests.api_entries import CHAPTERS, Entry

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "api.md"
BLOCK = "<!-- {0}: from the docstrings -->\n{1}<!-- end of {0} -->"
WIDTH = 120  # characters of a line of prose
CODE_WIDTH = 88  # characters of a signature in one line
ITEM = re.compile(r"^- (?P<names>``\w+``(?:, ``\w+``)*): (?P<text>.*)$", re.DOTALL)
SHOWN_DEFAULTS = ("NoneType", "bool", "int", "float", "str", "tuple")  # types of defaults
INTERNAL = ("settings",)  # parameters that only the package passes
READABLE = {  # names of types that only the source knows
    "Callable[[Callable[P, T_co]], Listening[P, T_co]]": "Callable[[F], F]",
    "Callable[[C], C]": "Callable[[F], F]",
    "ErrorTypes": "tuple[type[BaseException], ...]",
    "Path": "str | Callable",
    "'": '"',
}


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def rewritten(page: str) -> str:
    """Return the page with the chapters as the code has them now."""
    for name, entries in CHAPTERS.items():
        pattern = BLOCK.format(re.escape(name), "(.*?)")
        found = re.findall(pattern, page, re.DOTALL)
        assert len(found) == 1, f"{len(found)} chapters {name!r} in {PAGE}"
        page = page.replace(BLOCK.format(name, found[0]), BLOCK.format(name, chapter(entries)))
    return page


def chapter(entries: list[Entry]) -> str:
    """Return the entries, with the guide of several in a row at the last of them."""
    following = [*(each.see for each in entries[1:]), ""]
    made = "\n" + "".join(
        f"{part}\n\n"
        for entry, see in zip(entries, following, strict=True)
        for part in parts(entry, with_guide=entry.see != see)
    )
    return re.sub(r"^(- .*(?:\n  .*)*)\n\n(?=- )", r"\1\n", made, flags=re.MULTILINE)


def parts(entry: Entry, *, with_guide: bool = True) -> Iterator[str]:
    """Yield heading, signature, description, errors, methods, and links or an example."""
    value = entry.value()
    text, example = split(entry.text or inspect.getdoc(value) or "")
    promise = "" if entry.stable else "**Provisional.** "
    if not entry.level:
        called = entry.signature is None
        shown = call_of(entry.name, value, with_types=False) if called else entry.name
        yield item(shown, promise + text)
        return
    if entry.heading:
        yield f"{'#' * entry.level} {entry.heading}"
    if shown := signature_of(entry, value):
        yield f"```py\n{shown}\n```"
    for number, paragraph in enumerate(text.split("\n\n")):
        yield formatted(paragraph if number else f"{promise}{paragraph}")
    if entry.methods:
        yield "\n".join(method(value, name) for name in entry.methods)
    if entry.see and with_guide:
        yield filled(f"See {entry.see}.")
    if (example := entry.example or example) and not entry.see:  # else the guide has examples
        yield f"```python\n{example.strip()}\n```"


# --- docstrings ----------------------------------------------------------------------------------


def split(doc: str) -> tuple[str, str]:
    """Return the prose of a docstring, and its example."""
    prose, _, example = doc.partition("\n\nExample::\n\n")
    return prose, textwrap.dedent(example)


def formatted(paragraph: str) -> str:
    """Return a paragraph of a docstring as Markdown."""
    split_items = re.split(r"^(?=- ``)", paragraph, flags=re.MULTILINE)
    matches = [ITEM.match(" ".join(each.split())) for each in split_items if each]
    if matches and all(matches):
        rows = [f"| {each['names']} | {cell(each['text'])} |" for each in matches if each]
        return code("\n".join(["| name | |", "|---|---|", *rows]))
    return filled(re.sub(r"^Raises\b", "**Raises**", code(paragraph)))


def cell(text: str) -> str:
    return text.removesuffix(".").replace("|", r"\|")


def code(text: str) -> str:
    """Return reStructuredText's marks of code as Markdown's."""
    return re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)


def filled(text: str, *, indent: str = "") -> str:
    words = " ".join(text.split())
    return textwrap.fill(
        words, WIDTH, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent
    )


def method(cls: type, name: str) -> str:
    """Return the item of a method: its signature, and its docstring without the example."""
    value = inspect.getattr_static(cls, name)
    if isinstance(value, property):
        shown = f"{name}: {annotation(inspect.signature(value.fget).return_annotation)}"  # type: ignore[arg-type]
        doc = inspect.getdoc(value.fget)
    else:
        bound = isinstance(value, (classmethod, staticmethod))
        call = value.__func__ if bound else value
        first = not isinstance(value, staticmethod)
        shown = call_of(name, call, without_first=first, with_types=False)
        shown = (
            shown.removesuffix(f" -> {cls.__name__}").removesuffix(" -> Q").removesuffix(" -> None")
        )
        doc = inspect.getdoc(call)
    prose = split(doc or "")[0]
    if issubclass(cls, QuerySet):
        return item(shown, prose)
    return filled(f"- `{shown}`: {code(prose)}", indent="  ")


def item(shown: str, prose: str) -> str:
    """Return a list item with the first paragraph of a docstring; a guide says the rest."""
    call = " ".join(shown.split()).replace("( ", "(").replace(", )", ")")
    return filled(f"- `{call}`: {code(prose.partition(chr(10) * 2)[0])}", indent="  ")


# --- signatures ----------------------------------------------------------------------------------


def signature_of(entry: Entry, value: Any) -> str:
    """Return how a name is called, with types; empty if it is not called by your code."""
    if entry.signature is not None:
        return entry.signature
    with_types = "\n- ``" not in (inspect.getdoc(value) or "")  # else a table says more
    if inspect.isroutine(value):
        return call_of(entry.name, value, with_types=with_types)
    if isinstance(value, type):
        bases = ", ".join(each.__name__ for each in value.__bases__ if each.__name__[0] != "_")
        bases = "" if bases in ("object", "") else f"({bases})"
        if issubclass(value, BaseException) and "__init__" not in vars(value):
            return f"class {entry.name}{bases}"
        return call_of(entry.name, value, with_types=with_types)
    return ""


def call_of(name: str, call: Any, *, without_first: bool = False, with_types: bool = True) -> str:
    """Return a call with its parameters, in one line if there is room."""
    taken = inspect.signature(call)
    parameters = [
        each
        for each in taken.parameters.values()
        if each.name[0] != "_" and each.name not in INTERNAL
    ]
    words, only_keywords = [], False
    for each in parameters[1:] if without_first else parameters:
        if each.kind is each.KEYWORD_ONLY and not only_keywords:
            words.append("*")
        only_keywords = only_keywords or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        words.append(parameter(each, with_types=with_types))
    result = "" if isinstance(call, type) else f" -> {returned(call, taken)}"
    prefix = "async " if inspect.iscoroutinefunction(call) else ""
    line = f"{prefix}{name}({', '.join(words)}){result}"
    if len(line) <= CODE_WIDTH or without_first:
        return line
    if not with_types:
        words = textwrap.wrap(", ".join(words), CODE_WIDTH, break_on_hyphens=False)
        words = [each.removesuffix(",") for each in words]
    return f"{prefix}{name}(\n" + "".join(f"    {each},\n" for each in words) + f"){result}"


def parameter(given: inspect.Parameter, *, with_types: bool) -> str:
    stars = "*" if given.kind is given.VAR_POSITIONAL else ""
    stars = "**" if given.kind is given.VAR_KEYWORD else stars
    text = f"{stars}{given.name}"
    typed = with_types and given.annotation is not given.empty
    if typed:
        text += f": {annotation(given.annotation)}"
    if given.default is not given.empty:
        equals = " = " if typed else "="
        text += f"{equals}{default(given.default)}"
    return text


def annotation(given: Any) -> str:
    """Return a type as the source writes it, without what only the source needs."""
    text = given if isinstance(given, str) else inspect.formatannotation(given)
    text = re.sub(r"\bInitVar\[(.*)\]$", r"\1", text)
    text = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text)
    for name, readable in READABLE.items():
        text = text.replace(name, readable)
    return text


def returned(call: Any, taken: inspect.Signature) -> str:
    """Return the type of the result; a generator that is a context manager is shown as one."""
    text = annotation(taken.return_annotation)
    wrapped = inspect.unwrap(call)
    if call is not wrapped and inspect.isgeneratorfunction(wrapped):
        text = re.sub(r"^Iterator\b", "AbstractContextManager", text)
    return text


def default(value: Any) -> str:
    if value == "__GLOBAL__":
        return "GLOBAL"
    if isinstance(value, Enum):
        return "ANY" if value.name == "ANY" else "..."
    if type(value).__name__ not in SHOWN_DEFAULTS:
        return "..."
    return json.dumps(value) if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    main()
