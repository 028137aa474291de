"""The admin on another site than Django's: its pages and redirects stay there."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.test import Client
from django.urls import path

from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxOperation, OutboxPause
from tests.table import keyed, siblings
from tests.test_admin import crawl, make, say_yes

django, ops, small = (admin.AdminSite(each) for each in ("admin", "ops", "small"))
django.register(User)
for model, its in admin.site._registry.items():
    if model._meta.app_label == "django_outbox":
        ops.register(model, type(its))
        if model is OutboxEvent:
            small.register(model, type(its))
urlpatterns = [path(f"{each.name}/", each.urls) for each in (django, ops, small)]


@pytest.mark.django_db
@pytest.mark.parametrize("site", ["ops", "small"])
def test_every_link_leads_to_a_page_of_the_same_site(
    admin_client: Client, settings: Any, site: str
) -> None:
    """Also where the others, and Django's own, do not have the page."""
    settings.ROOT_URLCONF = __name__
    event = make(last_error="OSError: no", key="k", seq=1)
    siblings(event.pk, "order.placed mail")
    keyed("k2", 2, due=60, status=Status.RETRY)
    OutboxPause.objects.pause("queue", "default")
    found = crawl(admin_client, f"/{site}/", root=f"/{site}/")
    assert len(found) > 30
    links = [each for page in found.values() for each in re.findall(r'href="(/[^"]*)"', page)]
    assert {each.split("/")[1] for each in links} <= {"", site, "static"}  # "": the site itself
    page = admin_client.get(next(each for each in found if "/replay/" in each))
    assert say_yes(admin_client, page).url.startswith(f"/{site}/")
    page = f"/{site}/django_outbox/outboxevent/all/replay/?state=dead"
    answer = admin_client.post(page, {"rate": ""})
    assert answer.url.startswith(f"/{site}/")
    assert OutboxOperation.objects.open().exists()
