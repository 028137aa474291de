"""The Django app: at start-up, register checks and import listeners; open and start nothing."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module

from django.apps import AppConfig, apps
from django.conf import settings
from django.utils.module_loading import import_string, module_has_submodule
from django.utils.translation import gettext_lazy as _

from . import log  # noqa: F401 - from now on, the package's logger never raises
from .conf import current, problems
from .exceptions import ListenerAlreadyRegistered
from .listeners import registry


class OutboxConfig(AppConfig):
    name = "django_outbox"
    verbose_name = _("Outbox")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks  # noqa: F401 - registers them; needs models
        from .relays.relay import register

        if not problems():  # otherwise the checks report what is wrong
            discover(current().LISTENER_MODULE)
            load_task_backends()
            register()
            if current().EMBEDDED or (settings.DEBUG and sys.argv[1:2] == ["runserver"]):
                from .process import embedded

                embedded.install()


def load_task_backends() -> None:
    """Import the backends in TASKS, so that a worker has the listener of the outbox's backend."""
    for each in getattr(settings, "TASKS", {}).values():
        with suppress(ImportError, KeyError):  # Django's tasks report what is wrong
            import_string(each["BACKEND"])


def discover(name: str) -> None:
    """Import the listener module of every app; keep duplicate registrations for the checks."""
    for config in apps.get_app_configs():
        if config.module is None or not module_has_submodule(config.module, name):
            continue
        try:
            import_module(f"{config.name}.{name}")
        except ListenerAlreadyRegistered as error:
            registry.conflicts.append(str(error))
