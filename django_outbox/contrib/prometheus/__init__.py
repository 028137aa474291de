"""Prometheus metrics of writers, workers and the backlog.

To enable them, add ``django_outbox.contrib.prometheus`` to ``INSTALLED_APPS`` and install the extra
``prometheus``. They are in prometheus_client's own registry, where django-prometheus finds them.
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


# All addresses, as in prometheus_client: Prometheus runs on another host.
def serve(port: int, address: str = "0.0.0.0") -> tuple[WSGIServer, Thread]:  # noqa: S104
    """Serve ``/metrics`` on this port (0: any free one) from a daemon thread.

    To stop it, call ``server.shutdown()``, ``server.server_close()`` and ``thread.join()``. If
    ``PROMETHEUS_MULTIPROC_DIR`` is set, it serves the metrics of all processes that share it.

    Raises ``ImproperlyConfigured`` if the app is not installed, ``OSError`` if the port is taken.

    Example::

        def serve_metrics():
            server, thread = serve(9109)
            return server
    """
    ensure_installed()
    from prometheus_client import start_http_server

    from .metrics import registry
    from .receivers import install

    return start_http_server(port, address, registry=registry(install().backlog))
