"""Hostile input: ``write`` stores each value exactly or refuses it with an error of its own.

``OUTBOX_EXAMPLES=50000`` tries 50,000 examples instead of 60.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext, override_settings
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import django_outbox as outbox
from django_outbox import Worker, write
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests.table import PLACED, insert, listening, row, statuses
from tests.testapp.models import Order
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

EXAMPLES = int(os.environ.get("OUTBOX_EXAMPLES", "60"))
MOST = 20_000  # bytes; MAX_PAYLOAD_BYTES here, so that examples reach it

# --- generated input ------------------------------------------------------------------------------

# Surrogates and NULs too, which st.text() leaves out or seldom draws.
hostile = st.text(st.characters() | st.sampled_from("\0\ud800\udfff\u2028\\'\"%{};\x1b\x7f﻿"))
numbers = (
    st.integers()
    | st.floats()
    | st.sampled_from([-0.0, 1e308, 5e-324, 2**53 + 1, -(2**63) - 1, 2**64, 10**400, 1e16])
)
scalars = st.none() | st.booleans() | numbers | hostile
unfit = st.binary() | st.sets(st.integers()) | st.complex_numbers() | st.builds(object)
values = st.recursive(
    scalars | unfit,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(hostile | st.integers() | st.none(), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=20,
)
fitting = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=30,
)


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


deep = st.sampled_from([31, 99, 100, 101, 400, 5000, 200_000]).map(nested)
long = st.integers(MOST - 30, MOST + 30).map(lambda size: "ü" * (size // 2))
payloads = fitting | values | deep | long

plain = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=300)
texts = plain | hostile | st.just("") | st.just("ends with a space ") | st.integers() | st.none()
instants = (
    st.datetimes(timezones=st.just(timezone.utc) | st.timezones())
    | st.sampled_from([datetime(year, 1, 1, tzinfo=timezone.utc) for year in (1, 1970, 9999)])
    | texts
)
delays = st.floats() | st.integers() | st.timedeltas() | st.none() | hostile
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "aggregate_type": texts,
    "aggregate_id": texts,
    "tenant_id": texts,
    "headers": st.none() | st.dictionaries(texts, texts, max_size=4) | values,
    "key": texts,
    "event_id": texts,
    "unique_key": texts,
    "occurred_at": instants,
    "available_at": instants,
    "deliver_after": delays,
}
few = st.lists(st.sampled_from([*FIELDS]), max_size=3, unique=True)
given_fields = few.flatmap(lambda names: st.fixed_dictionaries({n: FIELDS[n] for n in names}))

often = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True)
def bound() -> Iterator[None]:
    with override_settings(OUTBOX={"MAX_PAYLOAD_BYTES": MOST, "POLL_INTERVAL": 0.2}):
        yield


@pytest.mark.filterwarnings("ignore:The outbox received a naive datetime")
@often
@example("x", 1, {"headers": {"h": "a" * (MOST + 1)}})
@example("x", 1, {"event_id": "\0"})
@example("x", "\ud800", {})
@example("x", math.nan, {})
@given(plain | texts, payloads, given_fields)
def test_what_is_refused_is_refused_by_name_and_before_any_sql(
    event_type: Any, payload: Any, fields: Mapping[str, Any]
) -> None:
    OutboxEvent.objects.all().delete()
    with transaction.atomic():
        with CaptureQueriesContext(connection) as sent:
            try:
                event_id = write(event_type, payload, **fields)
            except outbox.InvalidEvent:
                event_id = None
            except TypeError:
                event_id = None
                times = fields.get("available_at", 1), fields.get("deliver_after", 1)
                if None not in times:  # None is refused as an argument, not as an event
                    raise
        assert bool(sent.captured_queries) == (event_id is not None)
        Order.objects.create(sku="the transaction is usable")
    assert OutboxEvent.objects.count() == (event_id is not None)
    if event_id is not None:
        assert equal(json.loads(row(event_id).payload), as_json(payload))
        Order.objects.all().delete()


def as_json(payload: Any) -> Any:
    """Return what JSON makes of a payload: tuples become lists, keys become texts."""
    return json.loads(json.dumps(payload, default=lambda value: None))


def equal(one: Any, other: Any) -> bool:
    """Compare exactly: -0.0 is not 0.0, and 1 is neither True nor 1.0."""
    return json.dumps(one) == json.dumps(other)


# --- every route ----------------------------------------------------------------------------------


class Delivered:
    """What listeners got, by event id."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, Any, dict[str, str]]] = {}
        self._changed = threading.Condition()

    def __call__(self, event: outbox.Event) -> None:
        with self._changed:
            self._found[event.event_id] = (event.source, event.payload, dict(event.headers))
            self._changed.notify_all()

    def wait_for(self, *ids: str | None) -> list[tuple[str, Any, dict[str, str]]]:
        with self._changed:
            assert self._changed.wait_for(lambda: self._found.keys() >= {*ids}, 30), "not delivered"
            return [self._found.pop(str(each)) for each in ids]


# A payload is serialised once; that text is inserted and handed over.
def test_what_is_accepted_arrives_equal_by_every_route() -> None:
    cases: list[tuple[Any, dict[str, str]]] = []

    @often
    @given(fitting, st.dictionaries(st.text(), st.text(), max_size=4))
    def collect(payload: Any, headers: dict[str, str]) -> None:
        cases.append((payload, headers))

    collect()  # before any thread runs, since threads draw random numbers too
    delivered, routes = Delivered(), Counter[str]()
    with listening(delivered), Worker():
        for payload, headers in cases:
            with transaction.atomic():
                ids = [
                    write(PLACED, payload, headers=headers),
                    write(PLACED, payload, headers=headers, deliver_after=0.001),
                    write(PLACED, payload, headers=headers, key="a key"),
                ]
            for source, got, its_headers in delivered.wait_for(*ids):
                routes[source] += 1
                assert equal(got, payload)
                assert its_headers == headers
        wait_until(lambda: [*statuses()] == ["DONE"], what="all settled")
    assert routes["cold"] > routes["hot"] > 0


# --- what is stored already -----------------------------------------------------------------------


@often
@example("a \0 in the text")
@example("\ud800" * 5000)
@example("x" * 10**6)
@given(hostile)
def test_any_text_of_an_error_is_settled(text: str) -> None:
    OutboxEvent.objects.all().delete()
    (event_id,) = insert(1)

    def fail(event: outbox.Event) -> None:
        raise outbox.Unrecoverable(text)

    with listening(fail):
        assert outbox.drain() == 1
    found = row(event_id)
    assert found.status == Status.DEAD
    assert found.last_error is not None
    assert "Unrecoverable" in found.last_error


# --- sizes ----------------------------------------------------------------------------------------


def test_the_largest_of_everything_is_written() -> None:
    """This includes text whose size doubles when it is escaped."""
    payload, headers = '"' * (2**19 - 1), {"n": "\\" * (2**19 - 10)}
    with override_settings(OUTBOX={}), transaction.atomic():
        ids = outbox.write_many(
            [outbox.Event(event_type=PLACED, payload=payload, headers=headers) for _ in range(20)]
        )
    assert OutboxEvent.objects.count() == len(ids) == 20
