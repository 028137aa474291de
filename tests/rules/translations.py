"""The translations are complete, and have the placeholders of their texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from babel.messages.catalog import Catalog
from babel.messages.extract import extract
from babel.messages.mofile import read_mo
from babel.messages.pofile import PoFileError, read_po
from django.utils.translation import templatize

from tests.rules import Rule, Text

LANGUAGES = {"de": 2, "zh_Hans": 1}  # language: number of plural forms
# Django's functions that mark a text, with the positions of the texts in their arguments.
MARKS: dict[str, Any] = {
    **dict.fromkeys(("_", "gettext", "gettext_lazy", "gettext_noop")),
    **dict.fromkeys(("ngettext", "ngettext_lazy"), (1, 2)),
    **dict.fromkeys(("pgettext", "pgettext_lazy"), ((1, "c"), 2)),
}
PLACEHOLDER = re.compile(r"%(?:\(\w+\))?[-+ #0-9.]*[a-zA-Z%]|•••\d")

Message = tuple[str, ...]  # a text, or singular and plural


def catalogues_are_well_formed(root: Path) -> Iterator[str]:
    for language, forms in LANGUAGES.items():
        source = po(root, language)
        try:
            found = read_po(BytesIO(source.text.encode()), language, abort_invalid=True)
        except PoFileError as error:
            yield f"{source.path}:{error.lineno + 1}: {error}; correct it"
            continue
        if found.num_plurals != forms:
            yield source.fault(0, f"{found.num_plurals} plural forms; {language} has {forms}")


def every_text_is_translated(root: Path) -> Iterator[str]:
    """The catalogues have what the sources mark and nothing else, translated and not fuzzy."""
    wanted = {*marked(root)}
    if len(wanted) <= 250:
        yield "django_outbox:1: hardly any text is marked; does the rule still find the marks?"
    for _, source, found in catalogues(root):
        for message in sorted(wanted - {*translated(found)}):
            yield source.fault(0, f"no text {message}; run makemessages and translate it")
        for message, said in translated(found).items():
            if message not in wanted:
                yield fault(source, message, "no source has it; run makemessages")
            if not all(said):
                yield fault(source, message, "not translated; translate it")
        for each in found:
            if each.id and each.fuzzy:
                yield fault(source, texts(each.id), "fuzzy; check it and remove the mark")
        for message in found.obsolete:
            yield fault(source, texts(message), "obsolete; run makemessages with --no-obsolete")


def translations_have_the_placeholders(root: Path) -> Iterator[str]:
    """A translation has the placeholders, the plural forms and the outer spaces of its text."""
    for language, source, found in catalogues(root):
        for message, said in translated(found).items():
            if len(said) != (LANGUAGES[language] if len(message) > 1 else 1):
                yield fault(source, message, "the wrong number of plural forms; correct it")
            for text in said:
                if placeholders(text) != placeholders(message[-1]):
                    yield fault(source, message, "other placeholders than its text; correct them")
                if outside(text) != outside(message[0]):
                    yield fault(source, message, "other outer spaces than its text; correct them")


def compiled_catalogues_are_those_of_the_sources(root: Path) -> Iterator[str]:
    for language, source, found in catalogues(root):
        with (folder(root) / language / "LC_MESSAGES" / "django.mo").open("rb") as file:
            if translated(read_mo(file)) != translated(found):
                yield source.fault(0, "django.mo is not made of it; run compilemessages")


def catalogues_do_not_change_by_themselves(root: Path) -> Iterator[str]:
    """They are those of our languages, without dates and places."""
    names = {each.name for each in folder(root).iterdir()}
    for name in sorted(names ^ {*LANGUAGES}):
        yield f"django_outbox/locale/{name}:1: either missing or not in LANGUAGES"
    for language in LANGUAGES:
        source = po(root, language)
        for found in re.finditer(r"POT-Creation-Date|^#: ", source.text, re.MULTILINE):
            yield source.fault(found.start(), "changes by itself; remove the line")


RULES: list[Rule] = [
    catalogues_are_well_formed,
    every_text_is_translated,
    translations_have_the_placeholders,
    compiled_catalogues_are_those_of_the_sources,
    catalogues_do_not_change_by_themselves,
]


def marked(root: Path) -> Iterator[Message]:
    """Yield the texts that code and templates mark for translation."""
    for path in sorted((root / "django_outbox").rglob("*")):
        if path.suffix == ".py":
            source = path.read_text(encoding="utf-8")
        elif path.suffix == ".html":
            calls = templatize(path.read_text(encoding="utf-8"), origin=path.name)
            source = "\n".join(line.strip() for line in calls.splitlines())
        else:
            continue
        for _line, found, *_rest in extract("python", BytesIO(source.encode()), keywords=MARKS):
            yield texts(found)


def folder(root: Path) -> Path:
    return root / "django_outbox" / "locale"


def po(root: Path, language: str) -> Text:
    return Text.read(root, folder(root) / language / "LC_MESSAGES" / "django.po")


def catalogues(root: Path) -> Iterator[tuple[str, Text, Catalog]]:
    """Yield each catalogue that can be read, with its language and source."""
    for language in LANGUAGES:
        source = po(root, language)
        with suppress(PoFileError):
            found = read_po(BytesIO(source.text.encode()), language, abort_invalid=True)
            yield language, source, found


def fault(source: Text, message: Message, what: str) -> str:
    """Name the line of a message, or the first line if the file wraps it."""
    escaped = message[0].replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return source.fault(max(0, source.text.find(f'"{escaped}"')), f"{message[0]!r}: {what}")


def texts(found: Any) -> Message:
    return (found,) if isinstance(found, str) else tuple(found)


def translated(found: Catalog) -> dict[Message, Message]:
    return {texts(each.id): texts(each.string) for each in found if each.id}


def placeholders(text: str) -> list[str]:
    return sorted(PLACEHOLDER.findall(text))


def outside(text: str) -> tuple[bool, bool]:
    return text[:1].isspace(), text[-1:].isspace()
