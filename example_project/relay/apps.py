"""The relay is an app so that its listeners are found."""

from __future__ import annotations

from django.apps import AppConfig


class RelayConfig(AppConfig):
    name = "example_project.relay"
