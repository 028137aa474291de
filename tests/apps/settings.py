"""A project with django-oscar, Wagtail and the outbox, on SQLite."""

from __future__ import annotations

from oscar.defaults import *  # noqa: F403 - as its documentation has it

SECRET_KEY = "not a secret: the test suite only"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": ":memory:",
        "OPTIONS": {"transaction_mode": "IMMEDIATE"},
    }
}
OSCAR = (
    "analytics checkout address shipping catalogue catalogue.reviews communication partner basket "
    "payment offer order customer search voucher wishlists"
).split()
INSTALLED_APPS = [
    *(
        f"django.contrib.{name}"
        for name in "admin auth contenttypes sessions sites messages staticfiles flatpages".split()
    ),
    *(f"oscar.apps.{name}.apps.{name.title().replace('.', '')}Config" for name in OSCAR),
    *("haystack", "treebeard", "sorl.thumbnail", "easy_thumbnails", "django_tables2"),
    "widget_tweaks",
    *(f"wagtail.{name}" for name in ("users", "images", "documents", "search", "admin")),
    *("wagtail", "modelcluster", "taggit"),
    "django_outbox",
]
HAYSTACK_CONNECTIONS = {"default": {"ENGINE": "haystack.backends.simple_backend.SimpleEngine"}}
WAGTAILADMIN_BASE_URL = "http://127.0.0.1:8000"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
SITE_ID = 1
STATIC_URL = "/static/"
USE_TZ = True
ROOT_URLCONF = "tests.apps.settings"
urlpatterns: list[object] = []
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]
