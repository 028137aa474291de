"""Django settings of the browser's tests: static files, and a policy that allows nothing inline."""

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS, MIDDLEWARE

INSTALLED_APPS = [*INSTALLED_APPS, "django.contrib.staticfiles"]
MIDDLEWARE = ["tests.browser.policy.StrictPolicy", *MIDDLEWARE]
USE_I18N = True
LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
OUTBOX = {"DOORBELL": None}
