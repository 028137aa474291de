"""System checks for wrong or unwise setups, each with an id, a hint and what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router
from django.utils.module_loading import module_has_submodule

from .. import conf, hooks
from ..conf import Settings
from ..doorbell import UnusableDoorbell, create_doorbell
from ..events import GLOBAL, class_fault
from ..exceptions import did_you_mean
from ..listeners import callables, registry
from ..models import OutboxEvent
from . import queues  # noqa: F401 - registers its checks
from .databases import Configs, aliases

# What a process uses that only writes, or only purges; the other settings are of delivery.
WRITING_SETTINGS = (
    "MODE ENABLED LOCK_WAIT RETENTION_DONE RETENTION_INBOX PURGE_BATCH_SIZE PURGE_INTERVAL "
    "MAX_PAYLOAD_BYTES SERIALIZER WRITER_HOOKS CONTEXT_PROVIDERS SIGNAL_BRIDGE LISTENER_MODULE "
    "TABLE_PREFIX SCHEMA METRICS_NAMESPACE REDACT"
).split()

MOST_LISTENERS = 5  # of one event type; more cost more than most projects want
TASKS_BACKEND = "django_outbox.contrib.tasks.OutboxBackend"


@register("django_outbox")
def check_settings(app_configs: Configs, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report E001 unknown or invalid settings; E002 unusable dotted paths; E003 conflicts."""
    faults = conf.problems()
    for each in faults:
        yield Error(each.message, hint=each.hint, id="django_outbox.E001")
    if not faults:
        yield from (*_unresolved(), *_conflicts(conf.current()))


def _unresolved() -> Iterator[CheckMessage]:
    for load in (
        hooks.serializer,
        hooks.retry_policy,
        hooks.interceptors,
        hooks.writer_hooks,
        hooks.context_providers,
    ):
        try:
            load()
        except ImproperlyConfigured as error:
            yield Error(str(error), hint="Correct the dotted path.", id="django_outbox.E002")
    try:
        create_doorbell(router.db_for_write(OutboxEvent))
    except UnusableDoorbell as error:
        yield Error(error.message, hint=error.hint, id="django_outbox.E002")


def _conflicts(settings: Settings) -> Iterator[CheckMessage]:
    is_one_stream = settings.MODE == "ordered" and settings.ORDERING == "global"
    if is_one_stream and settings.UNROUTABLE == "dead" and settings.UNROUTABLE_GRACE > 0:
        yield Error(
            'OUTBOX["ORDERING"] is "global", where one event without a listener would block all '
            f'others for OUTBOX["UNROUTABLE_GRACE"] ({settings.UNROUTABLE_GRACE:g} s).',
            hint='Set OUTBOX["UNROUTABLE_GRACE"] = 0.',
            id="django_outbox.E003",
        )


@register("django_outbox")
def check_writer_only(app_configs: Configs, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report W006 settings and listeners without effect: MODE "writer_only" delivers nothing."""
    if conf.problems() or conf.current().MODE != "writer_only":
        return
    settings, default = conf.current(), Settings()
    without_effect = [
        name
        for name in conf.RULES
        if name not in WRITING_SETTINGS and getattr(settings, name) != getattr(default, name)
    ]
    without_effect += [each.where for each in registry.listeners() if each.check is None]
    if without_effect:
        yield Warning(
            f'In OUTBOX["MODE"] "writer_only" these have no effect: {", ".join(without_effect)}.',
            hint="In this mode events are only written; remove the other settings.",
            id="django_outbox.W006",
        )


@register("django_outbox")
def check_listeners(app_configs: Configs, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report E010, E012 uncallable listener or fallback; E011 duplicate; E013 bad payload class."""
    for each in registry.listeners():
        given = "the event" if each.batching is None else "the list of events"
        if fault := callables.fault(each.call, f"exactly one argument, {given}", None):
            hint = "Give it the signature (event)."
            yield Error(fault, hint=hint, id="django_outbox.E010")
        if each.payload_type is not None and (fault := class_fault(each.payload_type)):
            text = f"{each.where} takes a class that cannot be read from JSON: {fault}"
            hint = "Give its fields types that JSON can hold, defined or imported in its module."
            yield Error(text, hint=hint, id="django_outbox.E013")
        expected = "two arguments, the event and the failure"
        if each.fallback and (fault := callables.fault(each.fallback, expected, None, None)):
            hint = "Give it the signature (event, failure)."
            yield Error(fault, hint=hint, id="django_outbox.E012")
    hint = "Remove one of them, or give the second listener a name."
    for text in registry.conflicts:
        yield Error(text, hint=hint, id="django_outbox.E011")


@register("django_outbox")
def check_listeners_of_a_type(app_configs: Configs, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report W059 more than five listeners of one event type: each costs a row with the payload."""
    kinds = {GLOBAL, *(each.aggregate_type for each in registry.listeners())} - {registry.ANY}
    found = []
    for event_type in sorted({kind for each in registry.listeners() for kind in each.types}):
        most = max(len(registry.route(str(kind), event_type)) for kind in kinds)
        if most > MOST_LISTENERS:
            found.append(f"{event_type!r} ({most})")
    if found:
        yield Warning(
            f"More than {MOST_LISTENERS} listeners get the same events: {', '.join(found)}. Each "
            "write of one inserts a row with the payload for each of them.",
            hint="Call what belongs together from one listener, or silence this check if each "
            "needs retries of its own.",
            id="django_outbox.W059",
        )


@register("django_outbox")
def check_routing(app_configs: Configs, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report E040, W041 no model shares the outbox's database, so they cannot commit together."""
    outbox = router.db_for_write(OutboxEvent)
    business, others = set[str](), set[str]()
    for model in apps.get_models():
        if model._meta.app_label != OutboxEvent._meta.app_label:
            is_djangos = model.__module__.startswith("django.contrib.")
            (others if is_djangos else business).add(router.db_for_write(model))
    if not business or outbox in business:
        return
    text = (
        f"The outbox is written on {outbox!r}, but the project's models on {sorted(business)}: an "
        "event does not commit together with the change that it reports."
    )
    hint = (
        "Route django_outbox to where the business rows are. If each write and worker names its "
        "database (using=, --database), silence this check."
    )
    if outbox in others or not business.isdisjoint(aliases()):
        yield Warning(text, hint=hint, id="django_outbox.W041")
    else:
        yield Error(text, hint=hint, id="django_outbox.E040")


@register("django_outbox")
def check_atomic(app_configs: Configs, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report E042 an atomic listener whose app writes to a database without the outbox."""
    for each in (each for each in registry.listeners() if each.atomic):
        config = apps.get_containing_app_config(callables.qualified_name(each.call))
        written = {router.db_for_write(model) for model in config.get_models()} if config else set()
        if written and written.isdisjoint(aliases()):
            text = (
                f"{each.where} has atomic=True, but the models of its app are written on "
                f"{sorted(written)}, where the outbox has no table: they would not commit together."
            )
            hint = "Leave atomic=True out and make the listener idempotent."
            yield Error(text, hint=hint, id="django_outbox.E042")


@register("django_outbox")
def check_listener_module(app_configs: Configs, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report W060 a LISTENER_MODULE that no app has, if it was set or is called nearly the same."""
    if conf.problems():
        return
    name = conf.current().LISTENER_MODULE
    is_set = "LISTENER_MODULE" in getattr(settings, "OUTBOX", {})
    found = [each.module for each in apps.get_app_configs() if each.name != "django_outbox"]
    modules = [each for each in found if each and not each.__name__.startswith("django.")]
    if any(module_has_submodule(each, name) for each in modules):
        return
    known = {info.name for each in modules for info in iter_modules(each.__path__)}
    known = {each for each in known if is_set or "listener" in each}
    if not (is_set or known):
        return
    yield Warning(
        f"No app in INSTALLED_APPS has a module named {name!r}, where listeners are looked for "
        '(OUTBOX["LISTENER_MODULE"]): none was imported.',
        hint=did_you_mean(name, known, "Name a module as it is called in the apps."),
        id="django_outbox.W060",
    )


@register("django_outbox")
def check_embedded(app_configs: Configs, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report W030 embedded workers start with a request: without traffic, due events wait."""
    if not conf.problems() and conf.current().EMBEDDED and not settings.DEBUG:
        yield Warning(
            'OUTBOX["EMBEDDED"] is True: a worker starts with the first request of a process. '
            "Retries, delayed events and what a lost process held wait until some process has one.",
            hint="Run one outbox_worker next to the web server, then silence this check.",
            id="django_outbox.W030",
        )


@register("django_outbox")
def check_tasks(app_configs: Configs, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report E055 TASKS names the outbox, but no tasks framework is installed."""
    backends = getattr(settings, "TASKS", {})
    named = [alias for alias, each in backends.items() if each.get("BACKEND") == TASKS_BACKEND]
    if named and not find_spec("django.tasks") and not find_spec("django_tasks"):
        yield Error(
            f"TASKS[{named[0]!r}] names the outbox, but before Django 6 nothing reads TASKS "
            "without the package django-tasks.",
            hint="Run pip install 'django-transactional-outbox[tasks]'.",
            id="django_outbox.E055",
        )


# --- what matters only in production: for ``manage.py check --deploy`` ---


@register("django_outbox", deploy=True)
def check_deployment(app_configs: Configs, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report W007 naive times; W014 long timeouts; W050 stale connections."""
    if not conf.problems():
        yield from (*_naive_times(), *_long_timeouts(), *_stale_connections())


def _naive_times() -> Iterator[CheckMessage]:
    if not settings.USE_TZ:
        yield Warning(
            "USE_TZ is False: a naive occurred_at or available_at is read as local time, and one "
            "hour each autumn occurs twice.",
            hint="Set USE_TZ = True, or pass aware datetimes or deliver_after= and silence this.",
            id="django_outbox.W007",
        )


def _long_timeouts() -> Iterator[CheckMessage]:
    drain = conf.current().DRAIN_TIMEOUT
    long = [each.where for each in registry.listeners() if each.timeout and each.timeout > drain]
    if long:
        yield Warning(
            f'A stop waits {drain:g} s (OUTBOX["DRAIN_TIMEOUT"]) for running listeners, but '
            f"these may take longer by their own timeout: {', '.join(long)}. A deploy hands "
            "their events back, and they run again from the start.",
            hint='Raise OUTBOX["DRAIN_TIMEOUT"], or make sure that they can be repeated and '
            "silence this.",
            id="django_outbox.W014",
        )


def _stale_connections() -> Iterator[CheckMessage]:
    for alias in aliases():
        options = connections.settings[alias]
        is_kept = options.get("CONN_MAX_AGE", 0) is None and connections[alias].vendor != "sqlite"
        if is_kept and not options.get("CONN_HEALTH_CHECKS"):
            yield Warning(
                f"The connections of {alias!r} are kept for ever (CONN_MAX_AGE is None) and never "
                "checked: after a restart of the database each of them fails once.",
                hint="Set CONN_HEALTH_CHECKS = True as well.",
                id="django_outbox.W050",
            )
