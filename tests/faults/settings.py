"""Settings of every process of a run; ``FAULTS_OUTBOX`` is the dict ``OUTBOX`` as JSON."""

from __future__ import annotations

import json
import os

from tests.databases import databases

SECRET_KEY = "not a secret: the fault harness only"
DATABASES = {"default": databases()["default"]}
if zone := os.environ.get("FAULTS_SESSION_ZONE"):  # of the database session, not of Django
    DATABASES["default"]["OPTIONS"]["init_command"] = f"SET time_zone = '{zone}'"
if pooled := os.environ.get("FAULTS_POOLED"):  # by way of a pooler
    DATABASES["default"].update(json.loads(pooled))
if direct := os.environ.get("FAULTS_DIRECT"):  # by another way to the same database
    DATABASES["direct"] = {**DATABASES["default"], **json.loads(direct)}
INSTALLED_APPS = ["django_outbox", "tests.faults"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = os.environ.get("FAULTS_USE_TZ", "1") == "1"
# +05:45: a time read or stored in the wrong zone shows at once.
TIME_ZONE = os.environ.get("FAULTS_ZONE", "Asia/Kathmandu")
OUTBOX = json.loads(os.environ.get("FAULTS_OUTBOX", "{}"))
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"()": "tests.faults.clock.Formatter"}},
    "filters": {"evidence": {"()": "tests.faults.clock.Evidence"}},
    "handlers": {
        "stderr": {"class": "logging.StreamHandler", "formatter": "line", "filters": ["evidence"]}
    },
    "loggers": {"django_outbox": {"handlers": ["stderr"], "level": "DEBUG"}},
}
