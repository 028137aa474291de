"""Traces: an event carries the writer's span, and each delivery is a span linked to it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import django_outbox as outbox
from django_outbox.contrib import opentelemetry
from tests.table import PLACED, listening, row, statuses, write
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

HERE = "django_outbox.contrib.opentelemetry"
BOTH = {"CONTEXT_PROVIDERS": [f"{HERE}.remember"], "INTERCEPTORS": [f"{HERE}.restore"]}
SECRET = "canary-4711"
everywhere = pytest.mark.parametrize("where", ["drain", "worker"])
kinds = pytest.mark.parametrize("kind", ["plain", "async"])


class Traced:
    """The recorded spans, and a tracer that stands for the instrumentation of a request."""

    def __init__(self, exporter: InMemorySpanExporter, tracer: trace.Tracer) -> None:
        self.exporter, self.tracer = exporter, tracer

    def deliveries(self) -> list[ReadableSpan]:
        return [each for each in self.exporter.get_finished_spans() if each.name[:7] == "deliver"]

    def named(self, name: str) -> ReadableSpan:
        [span] = [each for each in self.exporter.get_finished_spans() if each.name == name]
        return span


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Iterator[Traced]:
    """Set up the SDK with a test exporter; the global provider could be set only once."""
    settings.OUTBOX = BOTH
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(opentelemetry, "_tracer", provider.get_tracer("django_outbox"))
    yield Traced(exporter, provider.get_tracer("shop"))
    provider.shutdown()


def deliver(where: str, status: str = "DONE", count: int = 1) -> None:
    if where == "drain":
        outbox.drain()
    else:
        with outbox.Worker():
            wait_until(lambda: statuses().get(status, 0) == count, what=f"{count} {status}")
    assert statuses().get(status, 0) == count


def nothing(event: outbox.Event) -> None:
    """Do nothing."""


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@everywhere
@kinds
def test_47_a_delivery_is_a_span_linked_to_the_writers(
    traced: Traced, where: str, kind: str
) -> None:
    def plain(event: outbox.Event) -> None:
        with traced.tracer.start_as_current_span("reserve"):
            pass

    async def awaited(event: outbox.Event) -> None:
        await asyncio.sleep(0)
        with traced.tracer.start_as_current_span("reserve"):
            await asyncio.sleep(0)

    with traced.tracer.start_as_current_span("POST /orders"):
        [event_id] = write(1)
    with listening(plain if kind == "plain" else awaited, name="stock"):
        deliver(where)
    [span], request = traced.deliveries(), traced.named("POST /orders")
    assert (span.name, span.kind, span.status.status_code) == (
        f"deliver {PLACED}",
        SpanKind.CONSUMER,
        StatusCode.UNSET,
    )
    [link] = span.links
    assert link.context.span_id == request.context.span_id
    assert link.context.trace_id == request.context.trace_id
    assert span.parent is None
    assert span.context.trace_id != request.context.trace_id
    found = attributes(span)
    assert found.pop("outbox.source") in ("hot", "cold")
    assert found == {
        "messaging.system": "django_outbox",
        "messaging.operation.name": "deliver",
        "messaging.operation.type": "process",
        "messaging.destination.name": PLACED,
        "messaging.message.id": event_id,
        "messaging.consumer.group.name": f"{PLACED} stock",
        "outbox.attempt": 1,
        "outbox.database": "default",
        "outbox.queue": "default",
    }
    inner = traced.named("reserve")
    assert inner.parent is not None
    assert inner.parent.span_id == span.context.span_id


@everywhere
def test_a_batch_has_one_span_with_a_link_for_each_event(traced: Traced, where: str) -> None:
    with traced.tracer.start_as_current_span("POST /orders"):
        write(3)
    with listening(lambda events: None, name="bulk", batch=3):
        deliver(where, count=3)
    [span], request = traced.deliveries(), traced.named("POST /orders")
    assert [link.context.span_id for link in span.links] == [request.context.span_id] * 3
    assert attributes(span) == {
        "messaging.system": "django_outbox",
        "messaging.operation.name": "deliver",
        "messaging.operation.type": "process",
        "messaging.destination.name": PLACED,
        "messaging.batch.message_count": 3,
        "messaging.consumer.group.name": f"{PLACED} bulk",
        "outbox.database": "default",
        "outbox.queue": "default",
    }


@everywhere
def test_47_each_listener_and_each_try_has_its_own_span(traced: Traced, where: str) -> None:
    def flaky(event: outbox.Event) -> None:
        if event.attempts < 2:
            raise outbox.RetryAfter(0)

    async def steady(event: outbox.Event) -> None:
        """Do nothing."""

    with traced.tracer.start_as_current_span("POST /orders"):
        write(1)
    with listening(flaky, name="flaky"), listening(steady, name="steady"):
        if where == "drain":
            while statuses() != {"DONE": 2}:
                outbox.drain()
        deliver(where, count=2)
    request = traced.named("POST /orders")
    seen = sorted(
        (
            attributes(each)["messaging.consumer.group.name"].split()[1],
            attributes(each)["outbox.attempt"],
            each.status.status_code,
        )
        for each in traced.deliveries()
    )
    assert seen == [
        ("flaky", 1, StatusCode.ERROR),
        ("flaky", 2, StatusCode.ERROR),
        ("flaky", 3, StatusCode.UNSET),
        ("steady", 1, StatusCode.UNSET),
    ]
    for span in traced.deliveries():
        assert [each.context.span_id for each in span.links] == [request.context.span_id]


@everywhere
@kinds
def test_47_a_secret_in_an_error_stays_out_of_the_span(
    traced: Traced, where: str, kind: str
) -> None:
    def plain(event: outbox.Event) -> None:
        raise LookupError(SECRET)

    async def awaited(event: outbox.Event) -> None:
        raise LookupError(SECRET)

    write(1, payload={"card": SECRET}, headers={"who": SECRET})
    with listening(plain if kind == "plain" else awaited, retry=outbox.Fixed(0, max_attempts=1)):
        deliver(where, "DEAD")
    [span] = traced.deliveries()
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "LookupError"
    assert [(each.name, dict(each.attributes or {})) for each in span.events] == [
        ("exception", {"exception.type": "LookupError"})
    ]
    assert SECRET not in span.to_json()


@everywhere
def test_an_event_that_a_listener_writes_is_linked_to_the_delivery(
    traced: Traced, where: str
) -> None:
    def follow(event: outbox.Event) -> None:
        write(1, "order.followed")

    write(1)
    with listening(follow), listening(nothing, "order.followed"):
        deliver(where, count=2)
    first, second = traced.named(f"deliver {PLACED}"), traced.named("deliver order.followed")
    assert first.links == ()
    assert [each.context.span_id for each in second.links] == [first.context.span_id]
    assert second.parent is None


@pytest.mark.parametrize(
    "header", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"], ids=["empty", "odd", "0"]
)
def test_a_damaged_header_links_nothing_and_harms_nothing(traced: Traced, header: str) -> None:
    write(1, headers={"traceparent": header})
    with listening(nothing):
        deliver("drain")
    [span] = traced.deliveries()
    assert span.links == ()


@everywhere
def test_baggage_travels_where_it_is_asked_for(traced: Traced, settings: Any, where: str) -> None:
    seen: list[Any] = []

    def note(event: outbox.Event) -> None:
        seen.append(baggage.get_baggage("tenant"))

    providers = [f"{HERE}.remember", f"{HERE}.remember_baggage"]
    token = context.attach(baggage.set_baggage("tenant", "acme"))
    try:
        write(1)
        settings.OUTBOX = {**BOTH, "CONTEXT_PROVIDERS": providers}
        write(1)
    finally:
        context.detach(token)
    with listening(note):
        deliver(where, count=2)
    assert sorted(seen, key=str) == [None, "acme"]
    assert baggage.get_baggage("tenant") is None


def test_47_there_is_no_span_around_the_loop(traced: Traced, settings: Any) -> None:
    """A worker records deliveries alone, and no span is open while it claims."""
    from django_outbox.signals import events_claimed

    settings.OUTBOX = {**BOTH, "POLL_BATCH_SIZE": 1}
    claims: list[Any] = []
    write(6)

    def note(**kwargs: Any) -> None:
        claims.append(trace.get_current_span().get_span_context().is_valid)

    events_claimed.connect(note)
    try:
        with listening(nothing):
            deliver("worker", count=6)
    finally:
        events_claimed.disconnect(note)
    assert len(claims) > 5 and not any(claims)
    assert len(traced.exporter.get_finished_spans()) == len(traced.deliveries()) == 6


def test_in_drain_the_caller_is_the_parent(traced: Traced) -> None:
    write(1)
    with traced.tracer.start_as_current_span("cron"), listening(nothing):
        outbox.drain()
    [span] = traced.deliveries()
    assert span.parent is not None
    assert span.parent.span_id == traced.named("cron").context.span_id


def test_without_an_sdk_nothing_is_written_and_all_is_delivered(settings: Any) -> None:
    settings.OUTBOX = BOTH

    [event_id] = write(1)
    assert row(event_id).headers is None
    with listening(nothing):
        deliver("drain")


def test_60_without_the_extra_it_says_which() -> None:
    script = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
try:
    import django_outbox.contrib.opentelemetry
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "django-transactional-outbox[opentelemetry]" in done.stdout
