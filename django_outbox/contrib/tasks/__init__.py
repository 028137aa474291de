"""Backend for Django's tasks framework: enqueueing writes an event; a worker runs the function.

``TASKS = {"default": {"BACKEND": "django_outbox.contrib.tasks.OutboxBackend"}}``
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.apps import apps

if TYPE_CHECKING or apps.is_installed("django_outbox"):
    from .backend import OutboxBackend
else:  # without the app there are no models to import
    from .uninstalled import OutboxBackend

__all__ = ["OutboxBackend"]
