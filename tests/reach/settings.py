"""The suite's settings with a site of its own; ``REACH_OUTBOX`` is the dict ``OUTBOX`` as JSON."""

import json
import os

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES


def sign_sessions() -> None:
    """Have PostgreSQL know whose a session is: nobody tells the peer of a Unix socket."""
    os.environ["PGAPPNAME"] = f"pid {os.getpid()}"


sign_sessions()
os.register_at_fork(after_in_child=sign_sessions)

DATABASES = {"default": DATABASES["default"]}
INSTALLED_APPS = ["django_outbox", "tests.testapp", "tests.reach"]  # starts in less time
MIDDLEWARE: list[str] = []
ROOT_URLCONF = "tests.reach.urls"
OUTBOX = json.loads(os.environ.get("REACH_OUTBOX", "{}"))
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,  # the web servers' own, which have begun to speak
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "loggers": {"django_outbox": {"handlers": ["console"], "level": "INFO"}},
}
