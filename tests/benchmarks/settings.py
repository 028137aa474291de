"""Settings of the benchmark and of its worker processes: the tests', with the listeners' app."""

from __future__ import annotations

import json
import os

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS as APPS

INSTALLED_APPS = [*APPS, "tests.benchmarks"]
TIME_ZONE = "UTC"
OUTBOX = json.loads(os.environ.get("OUTBOX_BENCH_SETTINGS", "{}"))
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"stderr": {"class": "logging.StreamHandler"}},
    "loggers": {"django_outbox": {"handlers": ["stderr"], "level": "WARNING"}},
}
