"""The translations appear in the admin; ``tests.rules`` checks that they are complete."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import translation

from tests.test_admin import LIST, PAGE, make

PAGES = {  # texts of each page: title, column, state, action
    "de": (["Outbox-Zustellungen", "Fehlversuche", "tot", "Tote erneut zustellen"], "Nutzdaten"),
    "zh-hans": (["发件箱投递", "失败次数", "死信", "重新投递死信"], "载荷"),
}


@pytest.mark.django_db
@pytest.mark.parametrize("language", PAGES)
def test_the_admin_speaks_the_language_that_is_active(admin_client: Client, language: str) -> None:
    event = make()
    words, payload = PAGES[language]
    with translation.override(language):
        text = admin_client.get(reverse(LIST)).content.decode()
        page = admin_client.get(reverse(PAGE, args=[event.pk])).content.decode()
    for word in words:
        assert word in text
    assert payload in page
