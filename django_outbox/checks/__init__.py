"""System checks: what is wrong or unwise, with an id, a hint and what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import apps
from django.core.checks import CheckMessage, Error, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import router

from .. import conf, hooks, registry
from ..conf import Settings
from ..models import OutboxEvent
from . import deploying, pooling  # noqa: F401 - registers theirs
from .databases import Configs, aliases

DELIVERING = (
    "EMBEDDED", "WORKERS", "PROCESSES", "ASYNC_CONCURRENCY", "HOT_QUEUE_CAPACITY",
    "COLD_QUEUE_CAPACITY", "FAIRNESS", "MAX_ATTEMPTS", "RETRY", "POLL_INTERVAL", "POLL_BATCH_SIZE",
    "PROBE_INTERVAL", "SKIP_RECENT", "LEASE", "MAX_RESCUES", "UNROUTABLE", "UNROUTABLE_GRACE",
    "DOORBELL", "DOORBELL_INTERVAL", "DEFER_LIMIT", "INTERCEPTORS", "ORDERING", "ON_DEAD",
    "STOP_ON_FIRST_FAILURE",
)  # fmt: skip


@register("django_outbox")
def check_settings(app_configs: Configs, **kwargs: Any) -> list[CheckMessage]:
    """E001 a setting is unknown or unfit; E002 a path leads nowhere; E003 two of them clash."""
    faults = conf.problems()
    if faults:
        return [Error(each.message, hint=each.hint, id="django_outbox.E001") for each in faults]
    return [*_unresolved(), *_clashes(conf.current())]


def _unresolved() -> Iterator[CheckMessage]:
    for load in (
        hooks.serializer, hooks.retry_policy, hooks.interceptors,
        hooks.writer_hooks, hooks.context_providers,
    ):  # fmt: skip
        try:
            load()
        except ImproperlyConfigured as error:
            yield Error(str(error), hint="Correct the dotted path.", id="django_outbox.E002")


def _clashes(settings: Settings) -> Iterator[CheckMessage]:
    if settings.DRAIN_TIMEOUT >= settings.LEASE:
        yield Error(
            f'OUTBOX["DRAIN_TIMEOUT"] ({settings.DRAIN_TIMEOUT:g} s) is not below OUTBOX["LEASE"] '
            f"({settings.LEASE:g} s).",
            hint="A worker must end before others may take what it holds.",
            id="django_outbox.E003",
        )

    if (
        settings.MODE == "ordered"
        and settings.ORDERING == "global"
        and settings.UNROUTABLE == "dead"
        and settings.UNROUTABLE_GRACE > 0
    ):
        yield Error(
            'OUTBOX["ORDERING"] is "global", where one event that nobody listens to would hold up '
            f'all others for OUTBOX["UNROUTABLE_GRACE"] ({settings.UNROUTABLE_GRACE:g} s).',
            hint='Set OUTBOX["UNROUTABLE_GRACE"] = 0.',
            id="django_outbox.E003",
        )


def _given(settings: Settings, names: Sequence[str]) -> list[str]:
    """Return which of these settings are not at their default."""
    default = Settings()
    return [name for name in names if getattr(settings, name) != getattr(default, name)]


@register("django_outbox")
def check_writer_only(app_configs: Configs, **kwargs: Any) -> list[CheckMessage]:
    """W006 in writer_only nothing is delivered: what serves delivery has no effect."""
    if conf.problems() or conf.current().MODE != "writer_only":
        return []
    idle = _given(conf.current(), DELIVERING)
    idle += [each.where for each in registry.listeners()]
    if not idle:
        return []
    return [
        Warning(
            f'In OUTBOX["MODE"] "writer_only" these have no effect: {", ".join(idle)}.',
            hint="Events are only written, for others to read; leave the rest out.",
            id="django_outbox.W006",
        )
    ]


@register("django_outbox")
def check_listeners(app_configs: Configs, **kwargs: Any) -> list[CheckMessage]:
    """E010, E012 a listener or its fallback cannot be called; E011 two claim one place; E013."""
    found: list[CheckMessage] = []
    for each in registry.listeners():
        if fault := each.fault:
            hint = "Give it the signature (event)."
            found.append(Error(fault, hint=hint, id="django_outbox.E010"))
        if fault := each.payload_fault:
            hint = "Give its fields types that JSON can hold, importable where the class stands."
            found.append(Error(fault, hint=hint, id="django_outbox.E013"))
        if fault := each.fallback_fault:
            hint = "Give it the signature (event, failure)."
            found.append(Error(fault, hint=hint, id="django_outbox.E012"))
    hint = "Remove one of them, or give the second listener a name."
    found += [Error(text, hint=hint, id="django_outbox.E011") for text in registry.conflicts]
    return found


@register("django_outbox")
def check_routing(app_configs: Configs, **kwargs: Any) -> list[CheckMessage]:
    """E040, W041 no business row is written where the outbox is, so they cannot commit together."""
    outbox = router.db_for_write(OutboxEvent)
    business, others = set[str](), set[str]()
    for model in apps.get_models():
        if model._meta.app_label != OutboxEvent._meta.app_label:
            is_djangos = model.__module__.startswith("django.contrib.")
            (others if is_djangos else business).add(router.db_for_write(model))
    if not business or outbox in business:
        return []
    text = (
        f"The outbox is written on {outbox!r}, but the project's models on {sorted(business)}: an "
        "event does not commit together with the change that it tells of."
    )
    hint = (
        "Route django_outbox to where the business rows are. If each write and worker names its "
        "database (using=, --database), silence this check."
    )
    if outbox in others or not business.isdisjoint(aliases()):
        return [Warning(text, hint=hint, id="django_outbox.W041")]
    return [Error(text, hint=hint, id="django_outbox.E040")]


@register("django_outbox")
def check_atomic(app_configs: Configs, **kwargs: Any) -> list[CheckMessage]:
    """E042 what an atomic listener's app writes is on a database without the outbox."""
    found: list[CheckMessage] = []
    for each in (each for each in registry.listeners() if each.atomic):
        config = apps.get_containing_app_config(registry.label(each.call))
        written = {router.db_for_write(model) for model in config.get_models()} if config else set()
        if written and written.isdisjoint(aliases()):
            text = (
                f"{each.where} has atomic=True, but the models of its app are written on "
                f"{sorted(written)}, where the outbox has no table: they would not commit together."
            )
            hint = "Leave atomic=True out and make the listener idempotent."
            found.append(Error(text, hint=hint, id="django_outbox.E042"))
    return found


@register("django_outbox")
def check_embedded(app_configs: Configs, **kwargs: Any) -> list[CheckMessage]:
    """W030 embedded workers live by requests: what falls due without traffic waits for one."""
    if conf.problems() or not conf.current().EMBEDDED:
        return []
    return [
        Warning(
            'OUTBOX["EMBEDDED"] is True: a worker starts with the first request of a process. '
            "Retries, delayed events and what a lost process held wait until some process has one.",
            hint="Run one outbox_worker beside the web server; then silence this check.",
            id="django_outbox.W030",
        )
    ]
