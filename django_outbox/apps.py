"""The app's name and its start: checks and listeners are found, nothing is opened or started."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

from django.apps import AppConfig, apps
from django.conf import settings
from django.utils.module_loading import import_string, module_has_submodule
from django.utils.translation import gettext_lazy as _

from . import registry
from .conf import current, problems
from .exceptions import ListenerAlreadyRegistered


class OutboxConfig(AppConfig):
    name = "django_outbox"
    verbose_name = _("Outbox")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks  # noqa: F401 - registers them; needs models

        if not problems():  # else the checks say what is wrong
            discover(current().LISTENER_MODULE)
            load_task_backends()
            if current().EMBEDDED:
                from .engine import embedded

                embedded.install()


def load_task_backends() -> None:
    """Import what TASKS names, so that a worker knows the listener of the outbox's backend."""
    for each in getattr(settings, "TASKS", {}).values():
        with suppress(ImportError, KeyError):  # the tasks themselves say what is wrong
            import_string(each["BACKEND"])


def discover(name: str) -> None:
    """Import the listener module of every app; a place taken twice is kept for the checks."""
    for config in apps.get_app_configs():
        if config.module is None or not module_has_submodule(config.module, name):
            continue
        try:
            import_module(f"{config.name}.{name}")
        except ListenerAlreadyRegistered as error:
            registry.conflicts.append(str(error))
