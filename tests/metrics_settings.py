"""Settings of worker processes that count for Prometheus."""

from __future__ import annotations

from tests.fault_settings import *  # noqa: F403
from tests.fault_settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "django_outbox.contrib.prometheus"]
