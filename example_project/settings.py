"""Settings of the example, for your own machine only."""

from __future__ import annotations

import os
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured

from example_project.broker import relays_from
from example_project.database import from_url

HERE = Path(__file__).resolve().parent

DEBUG = os.environ.get("DEBUG", "1") == "1"
SECRET_KEY = os.environ.get("SECRET_KEY", "for local use only" if DEBUG else "")
if not SECRET_KEY:
    raise ImproperlyConfigured("Without DEBUG the example needs a SECRET_KEY of its own.")
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_outbox",
    "example_project.shop",
    "example_project.warehouse",
    "example_project.partners",
]

DATABASES = {
    "default": from_url(os.environ.get("DATABASE_URL", f"sqlite:///{HERE / 'shop.sqlite3'}"))
}
# With a second database the shop and the outbox move there. See routers.py.
if shop := os.environ.get("SHOP_DATABASE_URL"):
    DATABASES["shop"] = from_url(shop)
    DATABASE_ROUTERS = ["example_project.routers.ShopRouter"]

OUTBOX = {
    # Short enough to watch: 0.2, 0.4 and 0.8 s (each × 0.5 to 1.5), dead after the fourth attempt.
    # The default keeps trying for about an hour and a half.
    "RETRY": {"policy": "exponential", "base": 0.2, "max_attempts": 4},
    # Every event goes to this broker too: RELAY_URL=amqp://guest:guest@localhost// for instance.
    "RELAYS": relays_from(
        os.environ.get("RELAY_URL", ""),
        secret=os.environ.get("RELAY_SECRET", ""),  # of a webhook: whsec_ and base64
    ),
}

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"
ASGI_APPLICATION = "example_project.asgi.application"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
STATIC_URL = "static/"
LANGUAGE_CODE = "en-gb"
TIME_ZONE = "UTC"
USE_TZ = True

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "{asctime} {levelname} {name} {message}", "style": "{"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {"django_outbox": {"handlers": ["console"], "level": "INFO"}},
}
