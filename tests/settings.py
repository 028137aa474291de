"""Django settings of the test suite; `tests.databases` says where its database is."""

from tests.databases import databases

SECRET_KEY = "not a secret: the test suite only"
DEBUG = False
ALLOWED_HOSTS = ["*"]

DATABASES = databases()
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django_outbox",
    "tests.testapp",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
ROOT_URLCONF = "tests.urls"
STATIC_URL = "/static/"
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

USE_TZ = True
TIME_ZONE = "Asia/Kathmandu"  # +05:45: a time read or stored in the wrong zone shows at once
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

BACKEND = "django_outbox.contrib.tasks.OutboxBackend"
RETRY = {"policy": "fixed", "delay": 0, "max_attempts": 3}
TASKS = {
    "default": {"BACKEND": BACKEND, "QUEUES": ["default", "mail"]},
    "retried": {"BACKEND": BACKEND, "OPTIONS": {"retry": RETRY}},
    "free": {"BACKEND": BACKEND, "QUEUES": []},
    "other": {"BACKEND": BACKEND, "OPTIONS": {"database": "other"}},
}
