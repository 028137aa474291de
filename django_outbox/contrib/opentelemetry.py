"""OpenTelemetry tracing: each delivery of an event is linked to the span that wrote it.

Add ``remember`` (and ``remember_baggage``) to ``OUTBOX["CONTEXT_PROVIDERS"]``, and ``restore`` to
``OUTBOX["INTERCEPTORS"]``. Only listeners get spans: a worker's loop never ends, so its span would
not end either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..delivery.decide import name as class_name
from ..events import Event
from ..listeners import registry
from ..listeners.queues import queue_of
from ..queue_settings import DEFAULT_QUEUE

try:
    from opentelemetry import context, trace
    from opentelemetry.baggage.propagation import W3CBaggagePropagator
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    from opentelemetry.util.types import AttributeValue
except ImportError as error:
    raise ImportError(
        f'{error}; expected "django-transactional-outbox[opentelemetry]" to be installed'
    ) from error

SYSTEM = "django_outbox"

_tracer = trace.get_tracer(SYSTEM)
_trace_context, _baggage = TraceContextTextMapPropagator(), W3CBaggagePropagator()


def remember() -> dict[str, str]:
    """Return the writer's span as the headers ``traceparent`` and, if there is one, ``tracestate``.

    Outside a span there are no headers.

    Example::

        assert opentelemetry.remember() == {}
    """
    headers: dict[str, str] = {}
    _trace_context.inject(headers)
    return headers


def remember_baggage() -> dict[str, str]:
    """Return the baggage as the header ``baggage``. It is stored with the event, so opt in.

    Example::

        assert opentelemetry.remember_baggage() == {}
    """
    headers: dict[str, str] = {}
    _baggage.inject(headers)
    return headers


@contextmanager
def restore(event: Event | list[Event]) -> Iterator[None]:
    """Wrap a listener's call in a span, linked to the writer's span, with the writer's baggage.

    The call of a batch listener gets one span with a link for each of its events, and no baggage.
    The span has only the class of an error, because an error's text may contain private data.

    Example::

        event = outbox.Event(event_type="order.placed", payload={"order": 7})
        with opentelemetry.restore(event):
            pass  # the listener is called here
    """
    with _delivery_span(event) as span:
        try:
            yield
        except BaseException as error:
            kind = class_name(error)
            span.set_status(Status(StatusCode.ERROR))
            span.set_attribute("error.type", kind)
            span.add_event("exception", {"exception.type": kind})
            raise


vars(restore)["batch"] = True


@contextmanager
def _delivery_span(subject: Event | list[Event]) -> Iterator[Span]:
    events = [subject] if isinstance(subject, Event) else subject
    first, several = events[0], not isinstance(subject, Event)
    token = context.attach(context.get_current() if several else _baggage.extract(first.headers))
    types = sorted({each.event_type for each in events})
    own: dict[str, AttributeValue] = {"messaging.batch.message_count": len(events)}
    if not several:
        own = {
            "messaging.message.id": first.event_id,
            "outbox.attempt": first.attempts + 1,
            "outbox.source": first.source,
        }
    try:
        with _tracer.start_as_current_span(
            f"deliver {types[0] if len(types) == 1 else first.listener}",
            kind=SpanKind.CONSUMER,
            links=[link for each in events for link in _links(each)],
            attributes={
                "messaging.system": SYSTEM,
                "messaging.operation.name": "deliver",
                "messaging.operation.type": "process",
                "messaging.destination.name": ",".join(types),
                "messaging.consumer.group.name": first.listener,
                "outbox.database": first.database,
                "outbox.queue": _queue(first),
                **own,
            },
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            yield span
    finally:
        context.detach(token)


def _queue(event: Event) -> str:
    """Return the queue of the listener that is about to be called."""
    route = registry.route(event.aggregate_type, event.event_type)
    found = (queue_of(each) for each in route if each.title == event.listener)
    return next(found, DEFAULT_QUEUE)


def _links(event: Event) -> list[Link]:
    """Return a link to the writer's span; no link if the header is foreign or damaged."""
    written = trace.get_current_span(_trace_context.extract(event.headers, context.Context()))
    found = written.get_span_context()
    return [Link(found)] if found.is_valid else []
