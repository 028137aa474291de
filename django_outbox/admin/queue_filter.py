"""Filters of the event and stream lists by queue; offered only if there is more than one queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..conf import current
from ..inspection.queues import queue_names


def has_queues() -> bool:
    """Return whether other queues than ``default`` are configured, so that a list shows them."""
    return len(current().queues) > 1


class QueueFilter(admin.SimpleListFilter):
    """Filter by queue: those configured, and others that rows wait in.

    A DISTINCT would scan the whole table for every page. If only ``default`` is configured, no
    query is made: workers move the rows of other queues there.
    """

    title = _("queue")
    parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        alias = model_admin.get_queryset(request).db
        names = queue_names(alias) if has_queues() else [*current().queues]
        if (chosen := self.value()) and chosen not in names:
            names.append(chosen)
        return [(each, each) for each in names]

    def has_output(self) -> bool:
        return super().has_output() and (self.value() is not None or len(self.lookup_choices) > 1)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value()
        if chosen is None:
            return queryset
        if "\0" in chosen:  # PostgreSQL rejects NUL
            raise IncorrectLookupParameters(self.parameter_name)
        return queryset.filter(queue=chosen)


class StreamQueueFilter(QueueFilter):
    """Filter streams by queue.

    Among all streams it finds those with a due time, by their index: idle ones may be many, and
    wait in no queue.
    """

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        found = super().queryset(request, queryset)
        is_all = self.value() is not None and request.GET.get("state") == "all"
        return found.filter(due_at__isnull=False) if is_all else found
