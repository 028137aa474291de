"""The business that the harness breaks."""

from django.apps import AppConfig


class FaultsConfig(AppConfig):
    name = "tests.faults"
    label = "faults"
