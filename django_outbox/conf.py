"""The dict ``OUTBOX``: validated and cached at first use, read again when the setting changes."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from django.conf import settings as django_settings
from django.core import mail
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from . import setting_rules as rules
from .exceptions import did_you_mean
from .queue_settings import (
    DEFAULT_WORKERS,
    MAX_QUEUES,
    QueueSettings,
    RelaySettings,
    queues_from,
    relays_from,
)
from .setting_rules import flag, identifier, integer, number, one_of, paths

DAY = 86400.0


def setting(default: Any, rule: rules.Rule) -> Any:
    return field(default=default, metadata={"rule": rule})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every key of ``OUTBOX`` with its default; durations are seconds."""

    MODE: str = setting("multi_node", one_of("multi_node", "single_node", "ordered", "writer_only"))
    ROUTE: str = setting("writer", one_of("writer", "worker"))  # who knows the listeners
    ENABLED: bool = setting(True, flag)
    EMBEDDED: bool = setting(False, flag)
    WORKERS: int = setting(4, integer(1))  # threads that run listeners
    PROCESSES: int = setting(1, integer(1))
    ASYNC_CONCURRENCY: int = setting(100, integer(1))
    # Async deliveries with a database connection, per queue and process; None: 2 × WORKERS.
    ASYNC_CONNECTIONS: int | None = setting(None, integer(1, optional=True))
    QUEUES: Mapping[str, Any] | None = setting(None, rules.queues)
    RELAYS: Mapping[str, Any] | None = setting(None, rules.relays)
    LISTENER_TIMEOUT: float | None = setting(None, number(0, above=True, optional=True))
    STUCK_AFTER: float = setting(600.0, number(0, above=True))
    HOT_QUEUE_CAPACITY: int = setting(1000, integer(1))  # events offered but not yet claimed
    COLD_QUEUE_CAPACITY: int = setting(1000, integer(1))  # claimed events waiting for a thread
    PREFETCH_BYTES: int = setting(64 * 1024**2, integer(1))  # of claimed payloads in memory
    BATCH_BYTES: int = setting(4 * 1024**2, integer(1))  # of payloads in one call; may overshoot
    FAIRNESS: tuple[int, int] = setting((2, 1), rules.weights)  # hot to cold claims when both wait
    MAX_ATTEMPTS: int = setting(20, integer(1))  # executions, for policies without a limit
    RETRY: Any = setting(None, rules.anything)  # policy, dotted path or dict; None: Exponential()
    POLL_INTERVAL: float = setting(5.0, number(0, above=True))
    POLL_BATCH_SIZE: int = setting(500, integer(1))
    PROBE_INTERVAL: float = setting(0.2, number(0, above=True))
    SKIP_RECENT: float = setting(0.0, number(0))
    LEASE: float = setting(30.0, number(0, above=True))
    MAX_RESCUES: int = setting(5, integer(2))
    DRAIN_TIMEOUT: float = setting(5.0, number(0))
    LOCK_WAIT: float = setting(2.0, number(0, above=True))
    DEFER_LIMIT: float | None = setting(None, number(0, above=True, optional=True))
    RETENTION_DONE: float | None = setting(7 * DAY, number(0, optional=True))
    RETENTION_DEAD: float | None = setting(None, number(0, optional=True))
    RETENTION_INBOX: float | None = setting(7 * DAY, number(0, optional=True))
    RETENTION_UNIQUE: float | None = setting(7 * DAY, number(0, optional=True))
    PURGE_BATCH_SIZE: int = setting(500, integer(1))
    PURGE_INTERVAL: float = setting(3600.0, number(0, above=True))
    MAX_PAYLOAD_BYTES: int = setting(1_048_576, integer(1))
    UNROUTABLE: str = setting("dead", one_of("dead", "retry", "ignore"))
    UNROUTABLE_GRACE: float = setting(600.0, number(0))
    DOORBELL: Any = setting("auto", rules.doorbell)
    DOORBELL_INTERVAL: float = setting(0.005, number(0))
    ORDERING: str = setting("aggregate", one_of("aggregate", "global"))
    STOP_ON_FIRST_FAILURE: bool = setting(True, flag)
    ON_DEAD: str = setting("continue", one_of("continue", "block"))
    SERIALIZER: Any = setting(None, rules.anything)  # dotted path; None: JSON
    WRITER_HOOKS: tuple[str, ...] = setting((), paths)
    CONTEXT_PROVIDERS: tuple[str, ...] = setting((), paths)
    INTERCEPTORS: tuple[str, ...] = setting((), paths)
    SIGNAL_BRIDGE: bool = setting(True, flag)
    LISTENER_MODULE: str = setting("listeners", rules.module)
    TABLE_PREFIX: str = setting("", identifier)
    SCHEMA: str | None = setting(None, identifier)  # PostgreSQL only; must exist
    METRICS_NAMESPACE: str = setting("outbox", identifier)
    REDACT: tuple[str, ...] = setting((), paths)

    @property
    def queues(self) -> dict[str, QueueSettings]:
        """The settings of each queue by its name: ``default``, those of ``QUEUES``, of relays."""
        given = dict(self.QUEUES or {})
        for relay in self.relays.values():
            own = {"WORKERS": DEFAULT_WORKERS, "BREAKER": {}}
            given[relay.title] = {**own, **given.get(relay.title, {})}
        return queues_from(given, self)

    @property
    def relays(self) -> dict[str, RelaySettings]:
        """The settings of each relay by its name."""
        return relays_from(self.RELAYS)


RULES: Mapping[str, rules.Rule] = {each.name: each.metadata["rule"] for each in fields(Settings)}


class Problem(NamedTuple):
    """An error in ``OUTBOX``: what is wrong and what to do."""

    message: str
    hint: str


def problems() -> list[Problem]:
    """Return every error in ``settings.OUTBOX``, for the system checks."""
    raw = getattr(django_settings, "OUTBOX", {})
    if not isinstance(raw, Mapping):
        return [Problem(f"OUTBOX is {raw!r}; expected a dict.", "Write OUTBOX = {…} in settings.")]
    found = []
    for key, value in raw.items():
        if key not in RULES:
            hint = did_you_mean(str(key).upper(), RULES, "See the settings reference.")
            found.append(Problem(f"OUTBOX[{key!r}] is not a setting.", hint))
        elif expected := RULES[key](value):
            shown = "not valid" if key == "RELAYS" else repr(value)  # it may contain passwords
            message = f'OUTBOX["{key}"] is {shown}; expected {expected}.'
            found.append(Problem(message, f'Correct OUTBOX["{key}"] or leave it out.'))
    if not found and (count := len(Settings(**raw).queues)) > MAX_QUEUES:
        message = (
            f"OUTBOX has {count} queues; expected at most {MAX_QUEUES}, those of relays and "
            '"default" included.'
        )
        hint = "Have fewer queues, or let a relay send several patterns of EVENTS."
        found.append(Problem(message, hint))
    return found


C = TypeVar("C", bound=Callable[..., Any])
_caches: list[Any] = []  # of functions that depend on the settings


def until_changed(function: C) -> C:
    """Cache the results of a function until the settings change."""
    cached: Any = lru_cache(maxsize=4096)(function)
    _caches.append(cached)
    return cached  # type: ignore[no-any-return]


def _reset(*, setting: str, **kwargs: Any) -> None:
    if setting == "OUTBOX":
        for each in _caches:
            each.cache_clear()


setting_changed.connect(_reset, dispatch_uid="django_outbox.conf")


@until_changed
def current() -> Settings:
    """Return the current settings; raise ``ImproperlyConfigured`` with every error in them."""
    if faults := problems():
        raise ImproperlyConfigured(" ".join(f"{each.message} {each.hint}" for each in faults))
    return Settings(**getattr(django_settings, "OUTBOX", {}))


def is_test_run() -> bool:
    """Return whether Django's test environment is set up, with which every test runner begins.

    It has a ``mail.outbox``. So has a site whose mail backend is locmem, which imports no tests.
    """
    return hasattr(mail, "outbox") and "django.test.utils" in sys.modules


def imported(where: str, path: str) -> Any:
    """Return what a dotted path names; ``where`` is the setting, for ``ImproperlyConfigured``."""
    try:
        return import_string(path)
    except ImportError as error:
        raise ImproperlyConfigured(
            f"{where} names {path!r}, which cannot be imported: {error}"
        ) from error


@until_changed
def _names() -> tuple[str, str]:
    """Return prefix and schema, each empty if it is invalid, which the checks report."""
    raw = getattr(django_settings, "OUTBOX", {})
    raw = raw if isinstance(raw, Mapping) else {}
    prefix, schema = raw.get("TABLE_PREFIX") or "", raw.get("SCHEMA") or ""
    return "" if identifier(prefix) else prefix, "" if identifier(schema) else schema


def table_name(name: str) -> str:
    """Return the ``db_table`` of an outbox table, for models and migrations."""
    prefix, schema = _names()
    return f'"{schema}"."{prefix}{name}"' if schema else f"{prefix}{name}"


def index_name(name: str) -> str:
    """Return an index name of at most 30 characters, different for each schema and prefix."""
    prefix, schema = _names()
    return f"{name}_{hashlib.sha256(f'{schema}.{prefix}'.encode()).hexdigest()[:8]}"
