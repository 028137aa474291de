"""The translations appear in the admin; ``tests.rules`` checks that they are complete."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import translation

from django_outbox.models import OutboxStream
from tests.test_admin import LIST, PAGE, boss, make

__all__ = ["boss"]  # the fixture

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
