"""The page of the Python API: how it is made, and each of its examples runs."""

from __future__ import annotations

import inspect
import threading
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction

import django_outbox as outbox
from django_outbox import relays, signals, testing
from django_outbox.listeners import registry
from django_outbox.signals import event_decided
from tests import api_reference
from tests.api_entries import CHAPTERS

ENTRIES = [entry for entries in CHAPTERS.values() for entry in entries]


# --- how it is made ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (lambda given, *, flag=True: None, "f(given, *, flag=True)"),
        (lambda *args, name="x", **rest: None, 'f(*args, name="x", **rest)'),
    ],
    ids=["keyword", "variable"],
)
def test_a_signature_shows_the_kinds_of_its_arguments(call: Callable[..., Any], shown: str) -> None:
    assert api_reference.call_of("f", call).startswith(shown)


# --- every example runs --------------------------------------------------------------------------


EXAMPLES = [
    (
        entry.heading or entry.path,
        entry.example or api_reference.split(entry.text or inspect.getdoc(entry.value()) or "")[1],
    )
    for entry in ENTRIES
]
IMPORTS = """
import json, logging, time
from datetime import timedelta

import msgspec, pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.test import TestCase, TransactionTestCase, override_settings
import django_outbox as outbox
from django_outbox.contrib import logs, opentelemetry
from django_outbox.contrib.prometheus import serve
from django_outbox.hooks import JSON
from django_outbox.inspection.overview import status
from django_outbox.models import OutboxEvent, OutboxInbox, OutboxPause, OutboxStream
from django_outbox.models import OutboxOperation
from django_outbox.relays import Backend, BrokerUnavailable, Message, Outcome, Unconfirmed
from django_outbox.signals import event_dead
from django_outbox.testing import *
"""
# What an example's listener decides; any other is done.
OUTCOMES = {
    "`Defer(…)`": "deferred",
    "`Dead(…)`": "dead",
    "`RetryAfter(…)`": "retry",
    "`Unrecoverable`": "dead",
    "`Failure`": "done",
    "`BrokerUnavailable`": "deferred",
}


def test_there_is_an_example_for_every_entry() -> None:
    assert [heading for heading, code in EXAMPLES if not code] == []


@contextmanager
def forgotten() -> Iterator[set[registry.Listener]]:
    """Yield the listeners that there were; forget what an example registers or connects."""
    before, receivers = {*registry.listeners()}, [*signals.event_dead.receivers]
    try:
        yield before
    finally:
        signals.event_dead.receivers = receivers
        signals.event_dead.sender_receivers_cache.clear()
        for each in {*registry.listeners()} - before:
            registry.remove(each.call)


def do_nothing(event: outbox.Event) -> None:
    """Get the events of examples whose subject is not the listener."""


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("heading", "code"), EXAMPLES, ids=[entry.path for entry in ENTRIES])
def test_an_example_runs(
    heading: str, code: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    names: dict[str, Any] = {"__name__": "sample", "__tmp__": tmp_path / "log"}
    with forgotten() as before:
        exec(compile(IMPORTS, "imports", "exec"), names)
        given = {*names}
        exec(compile(code, heading, "exec"), names)
        for new in {*registry.listeners()} - before:
            assert decided(new) == OUTCOMES.get(heading, "done")
        outbox.listener("order.placed", name="reserve")(do_nothing)
        made = {name: names[name] for name in names if name not in given}
        for name, value in made.items():
            if name.startswith("test_"):
                value(*map(request.getfixturevalue, inspect.signature(value).parameters))
            elif isinstance(value, type) and issubclass(value, unittest.TestCase):
                run_case(value)
        if check := CHECKS.get(heading):
            check(names)


def decided(listener: registry.Listener) -> str:
    """Deliver one event to a listener of an example; return what it decided."""
    outcomes: list[str] = []

    def record(*, outcome: str, **kwargs: Any) -> None:
        if kwargs["listener"].title == listener.title:
            outcomes.append(outcome)

    event_decided.connect(record)
    try:
        with transaction.atomic():
            outbox.write(listener.event_type, {"order": 7})
        outbox.drain()
    finally:
        event_decided.disconnect(record)
    [outcome] = outcomes
    return outcome


def run_case(case: type[unittest.TestCase]) -> None:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert result.testsRun == 1
    assert [text for _, text in result.failures + result.errors] == []


# --- examples that only define something ---------------------------------------------------------


def message(names: dict[str, Any]) -> Any:
    event = testing.make_event("order.placed", {"order": 7})
    return names["Message"](
        to="shop.orders",
        body=b'{"order":7}',
        content_type="application/json",
        headers={},
        event_id=event.event_id,
        event_type=event.event_type,
        key=None,
        group=None,
        event=event,
    )


def check_worker(names: dict[str, Any]) -> None:
    stop = threading.Event()
    stop.set()
    names["work_until"](stop)


def check_backend(names: dict[str, Any]) -> None:
    path = Path(names["__tmp__"])
    backend = names["Log"](path=str(path))
    backend.open()
    assert backend.publish([message(names)], 0.0) == [None]
    backend.close()
    assert path.read_bytes() == b'{"order":7}\n'
    with pytest.raises(outbox.BrokerUnavailable):
        names["Log"](path=str(path / "none")).open()


def check_message(names: dict[str, Any]) -> None:
    sent = message(names)
    assert names["as_line"](sent) == sent.event_id.encode() + b' {"order":7}'


def check_unconfirmed(names: dict[str, Any]) -> None:
    [outcome] = names["Silent"]().publish([message(names)], 0.0)
    assert isinstance(outcome, relays.Unconfirmed)


def check_outcome(names: dict[str, Any]) -> None:
    assert names["outcome_of"](200) is None
    assert isinstance(names["outcome_of"](404), outbox.Unrecoverable)


def check_written(names: dict[str, Any]) -> None:
    assert names["types"]([message(names).event]) == ["order.placed"]


def check_relayed(names: dict[str, Any]) -> None:
    assert names["bodies"]({"orders": [message(names)]}, "orders") == [b'{"order":7}']


def check_signal(names: dict[str, Any]) -> None:
    assert names["count_dead"] in [each[1]() for each in signals.event_dead.receivers]


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "`Worker(…)`": check_worker,
    "`Backend`": check_backend,
    "`Message`": check_message,
    "`Unconfirmed`": check_unconfirmed,
    "`Outcome`": check_outcome,
    "`Written`": check_written,
    "`Relayed`": check_relayed,
    "django_outbox:signals": check_signal,
}
