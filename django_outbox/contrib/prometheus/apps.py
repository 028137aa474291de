"""Django app that enables the Prometheus metrics."""

from __future__ import annotations

from importlib.util import find_spec

from django.apps import AppConfig
from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext_lazy as _

from ...conf import problems


class PrometheusConfig(AppConfig):
    name = "django_outbox.contrib.prometheus"
    label = "outbox_prometheus"
    verbose_name = _("Outbox metrics")

    def ready(self) -> None:
        if find_spec("prometheus_client") is None:
            raise ImproperlyConfigured(
                f"{self.name!r} is in INSTALLED_APPS, but prometheus_client is not installed. "
                'Install "django-transactional-outbox[prometheus]", or take the app out.'
            )
        if not problems():  # otherwise the checks report what is wrong
            from .receivers import install

            install()
