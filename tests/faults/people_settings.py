"""Settings of somebody who uses the admin: those of every process, and what the admin needs."""

from tests.faults.settings import *  # noqa: F403
from tests.faults.settings import INSTALLED_APPS as THEIRS
from tests.settings import MIDDLEWARE, PASSWORD_HASHERS, ROOT_URLCONF, STATIC_URL, TEMPLATES

__all__ = ["MIDDLEWARE", "PASSWORD_HASHERS", "ROOT_URLCONF", "STATIC_URL", "TEMPLATES"]

ALLOWED_HOSTS = ["*"]
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    *THEIRS,
]
