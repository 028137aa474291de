"""Prometheus metrics of writers and workers: receivers of our signals, and a look at the backlog.

``django_outbox.contrib.prometheus`` in ``INSTALLED_APPS``, with the extra ``prometheus`` installed,
switches them on. They are in prometheus_client's own registry, where django-prometheus finds them.
"""

from __future__ import annotations

from threading import Thread
from wsgiref.simple_server import WSGIServer

from django.apps import apps as installed  # this package has a module of that name
from django.core.exceptions import ImproperlyConfigured


def ensure_installed() -> None:
    """Raise ``ImproperlyConfigured`` if the app is not in ``INSTALLED_APPS``."""
    if not installed.is_installed(__name__):
        raise ImproperlyConfigured(
            f"There are no metrics to serve: {__name__!r} is not in INSTALLED_APPS. Add it, and "
            'install "django-transactional-outbox[prometheus]".'
        )


# Any address, as prometheus_client has it: who scrapes is on another host.
def serve(port: int, address: str = "0.0.0.0") -> tuple[WSGIServer, Thread]:  # noqa: S104
    """Answer ``/metrics`` on this port (0: any) from a thread of its own.

    ``server.shutdown()``, ``server.server_close()`` and ``thread.join()`` end it; it is a daemon
    thread. Where ``PROMETHEUS_MULTIPROC_DIR`` is set, it answers for all processes that share it.

    Raises ``ImproperlyConfigured`` if the app is not installed, ``OSError`` if the port is taken.
    """
    ensure_installed()
    from prometheus_client import start_http_server

    from .exposition import registry

    return start_http_server(port, address, registry=registry())
