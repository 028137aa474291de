"""The benchmarks as a Django app, so that worker processes find their listeners."""

from django.apps import AppConfig


class BenchmarksConfig(AppConfig):
    name = "tests.benchmarks"
    label = "benchmarks"
