"""Django admin of the outbox: inspect it, replay or discard dead events, pause delivery."""

from __future__ import annotations

from django.contrib import admin

from ..models import OutboxEvent, OutboxOperation, OutboxPause, OutboxStatistics, OutboxStream
from .dashboard import DashboardAdmin
from .event_admin import OutboxEventAdmin
from .operation_admin import OutboxOperationAdmin
from .pause_admin import OutboxPauseAdmin
from .stream_admin import OutboxStreamAdmin

admin.site.register(OutboxStatistics, DashboardAdmin)
admin.site.register(OutboxEvent, OutboxEventAdmin)
admin.site.register(OutboxStream, OutboxStreamAdmin)
admin.site.register(OutboxPause, OutboxPauseAdmin)
admin.site.register(OutboxOperation, OutboxOperationAdmin)
