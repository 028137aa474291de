"""The warehouse: pick lists and parcels. It knows the shop only through its events."""

from __future__ import annotations

from django.apps import AppConfig


class WarehouseConfig(AppConfig):
    name = "example_project.warehouse"
