"""Settings of the worker processes that tests break: ``OUTBOX`` and the log come from the test."""

from __future__ import annotations

import json
import os

from tests.settings import *  # noqa: F403

# Nobody looks at pages of theirs: without the admin these processes start in less time.
INSTALLED_APPS = ["django_outbox", "tests.testapp"]
ROOT_URLCONF, MIDDLEWARE, TEMPLATES = None, [], []

OUTBOX = {"LISTENER_MODULE": "fault_listeners", **json.loads(os.environ["OUTBOX_TEST_SETTINGS"])}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(created).3f %(process)d %(levelname)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {"django_outbox": {"handlers": ["stderr"], "level": "INFO"}},
}
