"""Simulated services of other companies: a card processor and a courier."""

from __future__ import annotations

from django.apps import AppConfig


class PartnersConfig(AppConfig):
    name = "example_project.partners"
