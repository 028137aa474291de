"""Django's settings of a simulated process; each history has an ``OUTBOX`` of its own."""

from __future__ import annotations

import os
from typing import Any

SECRET_KEY = "not a secret: the simulation only"
DATABASES = {
    "default": {
        "ENGINE": "tests.simulation.database",
        "NAME": os.environ.get("SIMULATION_DATABASE", "simulation.sqlite3"),
    }
}
INSTALLED_APPS = ["django_outbox"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
TIME_ZONE = "Asia/Kathmandu"  # +05:45: a time read or stored in the wrong zone shows at once
OUTBOX: dict[str, Any] = {}
