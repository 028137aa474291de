"""The translations are complete, have the right placeholders, and appear in the admin."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from babel.messages.catalog import Catalog
from babel.messages.extract import extract
from babel.messages.mofile import read_mo
from babel.messages.pofile import read_po
from django.test import Client
from django.urls import reverse
from django.utils import translation
from django.utils.translation import templatize

import django_outbox
from django_outbox.models import OutboxStream
from tests.test_admin import LIST, PAGE, boss, make

__all__ = ["boss"]  # the fixture

PACKAGE = Path(django_outbox.__file__).parent
CATALOGUES = PACKAGE / "locale"
LANGUAGES = {"de": 2, "zh_Hans": 1}  # language: number of plural forms
# Django's functions that mark a text, with the positions of the texts in their arguments.
MARKS: dict[str, Any] = {
    **dict.fromkeys(("_", "gettext", "gettext_lazy", "gettext_noop")),
    **dict.fromkeys(("ngettext", "ngettext_lazy"), (1, 2)),
    **dict.fromkeys(("pgettext", "pgettext_lazy"), ((1, "c"), 2)),
}
PLACEHOLDER = re.compile(r"%(?:\(\w+\))?[-+ #0-9.]*[a-zA-Z%]|•••\d")

Message = tuple[str, ...]  # a text, or singular and plural


def marked() -> Iterator[Message]:
    """Yield the texts that code and templates mark for translation."""
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix == ".py":
            source = path.read_text(encoding="utf-8")
        elif path.suffix == ".html":
            calls = templatize(path.read_text(encoding="utf-8"), origin=path.name)
            source = "\n".join(line.strip() for line in calls.splitlines())
        else:
            continue
        for _line, found, *_rest in extract("python", BytesIO(source.encode()), keywords=MARKS):
            yield (found,) if isinstance(found, str) else tuple(found)


def catalogue(language: str) -> Catalog:
    with (CATALOGUES / language / "LC_MESSAGES" / "django.po").open("rb") as file:
        return read_po(file, locale=language, abort_invalid=True)


def texts(found: Any) -> Message:
    return (found,) if isinstance(found, str) else tuple(found)


def translated(found: Catalog) -> dict[Message, Message]:
    return {texts(each.id): texts(each.string) for each in found if each.id}


def placeholders(text: str) -> list[str]:
    return sorted(PLACEHOLDER.findall(text))


@pytest.mark.any_database
def test_catalogues_are_those_that_are_promised() -> None:
    assert {each.name for each in CATALOGUES.iterdir()} == set(LANGUAGES)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.any_database
def test_whatever_the_sources_mark_is_translated_and_nothing_else(language: str) -> None:
    found, wanted = catalogue(language), {*marked()}
    assert len(wanted) > 250
    assert {*translated(found)} == wanted
    assert not found.obsolete
    assert [each.id for each in found if each.fuzzy] == []
    untranslated = [text for text, said in translated(found).items() if not all(said)]
    assert untranslated == []


@pytest.mark.parametrize(("language", "forms"), LANGUAGES.items(), ids=str)
@pytest.mark.any_database
def test_a_translation_has_the_placeholders_of_its_text(language: str, forms: int) -> None:
    found = catalogue(language)
    assert found.num_plurals == forms
    for marked_as, said in translated(found).items():
        assert len(said) == (forms if len(marked_as) > 1 else 1), marked_as
        for text in said:
            assert placeholders(text) == placeholders(marked_as[-1]), marked_as
            assert text[:1].isspace() == marked_as[0][:1].isspace(), marked_as
            assert text[-1:].isspace() == marked_as[0][-1:].isspace(), marked_as


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.any_database
def test_the_compiled_catalogue_is_that_of_the_source(language: str) -> None:
    with (CATALOGUES / language / "LC_MESSAGES" / "django.mo").open("rb") as file:
        assert translated(read_mo(file)) == translated(catalogue(language))


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.any_database
def test_a_catalogue_holds_no_dates_or_places_that_change_by_themselves(language: str) -> None:
    text = (CATALOGUES / language / "LC_MESSAGES" / "django.po").read_text(encoding="utf-8")
    assert "POT-Creation-Date" not in text
    assert "\n#: " not in text


PAGES = {  # texts of each page: title, column, state, action
    "de": (["Outbox-Ereignisse", "Fehlversuche", "tot", "Tote erneut zustellen"], "Nutzdaten"),
    "zh-hans": (["发件箱事件", "失败次数", "死信", "重新投递死信"], "载荷"),
}


@pytest.mark.django_db
@pytest.mark.parametrize("language", PAGES)
def test_the_admin_speaks_the_language_that_is_active(boss: Client, language: str) -> None:
    event = make()
    words, payload = PAGES[language]
    with translation.override(language):
        text = boss.get(reverse(LIST)).content.decode()
        page = boss.get(reverse(PAGE, args=[event.pk])).content.decode()
    for word in words:
        assert word in text
    assert payload in page


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("language", "title"), [("de", "Reserviert von"), ("zh-hans", "持有者")], ids=PAGES
)
def test_the_fields_of_a_stream_have_titles_in_that_language(
    boss: Client, language: str, title: str
) -> None:
    OutboxStream.objects.create(key="k", seq=7)
    with translation.override(language):
        url = reverse("admin:django_outbox_outboxstream_change", args=["k"])
        text = boss.get(url).content.decode()
    assert title in text
    assert '<div class="readonly">7</div>' in text
