"""Base admin for the outbox's tables: by default, rows cannot be added, edited or deleted."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Final

from django import urls
from django.contrib import admin
from django.contrib.auth import get_permission_codename
from django.db import router
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import NoReverseMatch

from ..models import OutboxEvent

INPUT: Final = {"class": "outbox-input"}  # attributes of a field that other themes do not know

_site: ContextVar[str] = ContextVar("outbox_site", default="admin")  # that answers the request


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Read-only admin of one outbox table; actions need a permission each.

    It reads from the database that events are written to, never from a replica.
    """

    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # facets count the whole table for each filter
    view_on_site = False

    class Media:
        css = {"all": ["django_outbox/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    has_delete_permission = has_change_permission

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Have links lead to the pages of this site: each view asks this first."""
        _site.set(self.admin_site.name)
        return super().has_view_permission(request, obj)

    def has_replay_permission(self, request: HttpRequest) -> bool:
        return may(request, "replay")

    def has_discard_permission(self, request: HttpRequest) -> bool:
        return may(request, "discard")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).using(router.db_for_write(self.model))

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        if "\0" in object_id:  # PostgreSQL would raise; other databases find nothing
            return None
        return super().get_object(request, object_id, from_field)


def reverse(name: str, *, args: Sequence[Any] = ()) -> str:
    """Return the URL of a page on the site that answers the request; "#" if it does not have it."""
    try:
        return urls.reverse(name, args=args, current_app=_site.get())
    except NoReverseMatch:
        return "#"


def may(request: HttpRequest, permission: str) -> bool:
    """Return whether the user has this permission of ``OutboxEvent``, such as "replay"."""
    meta = OutboxEvent._meta
    return request.user.has_perm(f"{meta.app_label}.{get_permission_codename(permission, meta)}")
