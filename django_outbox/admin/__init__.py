"""Events in the Django admin: look at all of them, replay or discard dead ones."""

from __future__ import annotations

from django.contrib import admin

from ..models import OutboxEvent, OutboxStream
from .event_admin import OutboxEventAdmin
from .stream_admin import OutboxStreamAdmin

admin.site.register(OutboxEvent, OutboxEventAdmin)
admin.site.register(OutboxStream, OutboxStreamAdmin)
