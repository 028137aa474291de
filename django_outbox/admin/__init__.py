"""Events in the Django admin: look at all of them, replay or discard dead ones."""

from __future__ import annotations

from django.contrib import admin

from ..models import OutboxEvent
from .event_admin import OutboxEventAdmin

admin.site.register(OutboxEvent, OutboxEventAdmin)
