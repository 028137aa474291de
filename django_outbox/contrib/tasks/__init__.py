"""Backend for Django's tasks framework: enqueueing writes an event; a worker runs the function.

``TASKS = {"default": {"BACKEND": "django_outbox.contrib.tasks.OutboxBackend"}}``
"""

from __future__ import annotations

from .backend import OutboxBackend

__all__ = ["OutboxBackend"]
