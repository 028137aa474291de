"""View pick lists and parcels."""

from __future__ import annotations

from django.contrib import admin

from .models import Parcel, PickList

admin.site.register(PickList, list_display=["order_number", "created_at"])
admin.site.register(Parcel, list_display=["order_number", "tracking_number", "booked_at"])
