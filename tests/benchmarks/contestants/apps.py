"""The contestants' own Django app: one table."""

from django.apps import AppConfig


class ContestantsConfig(AppConfig):
    name = "tests.benchmarks.contestants"
    label = "contestants"
    default_auto_field = "django.db.models.BigAutoField"
