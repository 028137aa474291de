"""Base admin for the outbox's tables: by default, rows cannot be added, edited or deleted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db import router, transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponseBase
from django.urls import URLPattern, path
from django.views.decorators.http import require_http_methods

from ..models.fields import DatabaseNow
from . import links

INPUT: Final = {"class": "outbox-input"}  # attributes of a field that other themes do not know


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Read-only admin of one outbox table; actions need a permission each.

    It reads from the database that events are written to, never from a replica.
    """

    # Permissions that allow users to see the table, besides its own.
    viewed_with: ClassVar[Sequence[str]] = ()
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # facets count the whole table for each filter
    view_on_site = False

    class Media:
        css = {"all": ["django_outbox/admin.css"]}

    @property
    def alias(self) -> str:
        return router.db_for_write(self.model)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    has_delete_permission = has_change_permission

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Have links lead to the pages of this site: each view asks this first."""
        links.site.set(self.admin_site.name)
        own = super().has_view_permission(request, obj)
        return own or any(may(request, each) for each in self.viewed_with)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Annotate ``seen_at``, the database's current time."""
        rows = super().get_queryset(request).using(self.alias)
        annotated: QuerySet[Any] = rows.annotate(seen_at=DatabaseNow())
        return annotated

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        if "\0" in object_id:  # PostgreSQL would raise; other databases find nothing
            return None
        return super().get_object(request, object_id, from_field)

    def page(
        self, route: str, name: str, view: Callable[..., HttpResponseBase], *methods: str
    ) -> URLPattern:
        """Return a URL pattern for users who may see the table.

        The view ignores ATOMIC_REQUESTS, because batches commit.
        """

        def guarded(request: HttpRequest, *args: Any, **options: Any) -> HttpResponseBase:
            if not self.has_view_permission(request):
                raise PermissionDenied
            request.current_app = self.admin_site.name
            return view(request, *args, **options)

        allowed = require_http_methods([*methods])(guarded)
        name = f"{self.opts.app_label}_{self.opts.model_name}_{name}"
        own = transaction.non_atomic_requests(self.admin_site.admin_view(allowed))
        return path(route, own, name=name)


def may(request: HttpRequest, permission: str) -> bool:
    """Return whether the user has a permission of the outbox, such as "replay_outboxevent"."""
    return request.user.has_perm(f"django_outbox.{permission}")
