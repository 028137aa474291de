"""The warehouse: pick lists and parcels. It knows the shop by its events only."""

from __future__ import annotations

from django.apps import AppConfig


class WarehouseConfig(AppConfig):
    name = "example_project.warehouse"
