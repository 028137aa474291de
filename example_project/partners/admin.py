"""The services' records; delete a row of the refused goods to repair the courier."""

from __future__ import annotations

from django.contrib import admin

from .models import Call, RefusedGoods

admin.site.register(
    Call, list_display=["at", "partner", "answer", "served"], list_filter=["partner", "served"]
)
admin.site.register(RefusedGoods, list_display=["sku", "reason"])
