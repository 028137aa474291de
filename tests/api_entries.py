"""The public names of the package, chapter by chapter of the reference, and what each promises.

A name is stable if a page of the reference promised it before this list was made, and provisional
if only a guide shows it. ``docs/reference/supported-versions.md`` says what stable means.
Change a promise only by decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One public name."""

    path: str  # module and name: "django_outbox:write"
    heading: str = ""  # empty: the heading of the chapter is its heading
    level: int = 3  # of the heading; 0: an item of a list, with the first paragraph only
    stable: bool = True
    signature: str | None = None  # None: from the code; empty: it is not called
    text: str = ""  # instead of a docstring
    example: str = ""  # instead of the docstring's
    methods: tuple[str, ...] = ()
    see: str = ""  # Markdown links, the end of a sentence that begins with "See"

    @property
    def name(self) -> str:
        return self.path.partition(":")[2]

    def value(self) -> Any:
        module, _, name = self.path.partition(":")
        return reduce(getattr, name.split("."), import_module(module))


def top(name: str, **options: Any) -> Entry:
    """Return the entry of a name of ``django_outbox`` itself."""
    return called(f"django_outbox:{name}", **options)


def called(path: str, *, heading: str = "", **options: Any) -> Entry:
    return Entry(path=path, heading=heading or f"`{path.partition(':')[2]}(…)`", **options)


def named(path: str, **options: Any) -> Entry:
    return called(path, heading=f"`{path.partition(':')[2]}`", **options)


def error(name: str, **options: Any) -> Entry:
    return named(f"django_outbox:{name}", **options)


def of_contrib(module: str, name: str, **options: Any) -> Entry:
    heading = f"`{module}.{name}`"
    return Entry(path=f"django_outbox.contrib.{module}:{name}", heading=heading, level=4, **options)


TESTING = "django_outbox.testing:"
RETRY = "[Choose how often to try](../how-to/retry.md)"
LISTEN = "[Listen](../how-to/listen.md)"
WRITE = "[Write events](../how-to/write-events.md)"
TEST = "[Test your events](../how-to/testing.md)"
BACKEND = "[Write a backend](relays.md#write-a-backend)"
PAUSE = "[Pause delivery](../how-to/pause-delivery.md)"
CONTEXT = "[Carry context to listeners](../how-to/hook-into-writing.md#carry-context-to-listeners)"
SIGNAL = "[Signal and write](../how-to/hook-into-writing.md#a-django-signal-that-also-writes)"
FALLBACK = "[Fall back](../how-to/retry.md#fall-back-when-a-listener-fails-for-good)"
TRACE = "[Trace](../how-to/hook-into-writing.md#traces)"
RAISED = "[Return values and exceptions](../how-to/listen.md#return-values-and-exceptions)"
EMBED = "[Embed a worker](../how-to/go-to-production.md#embed-a-worker-in-your-own-process)"
ERRORS = "[Writes fail](../how-to/troubleshoot.md#writes-fail)"

AWRITE = """Do what ``write`` does, in Django's thread-sensitive thread.

It takes the same arguments and returns the same. A transaction must be open in that thread.

Raises the same errors as ``write``.
"""
AWRITE_EXAMPLE = """
async def submit(order):
    return await outbox.awrite("order.submitted", {"order": order})


with transaction.atomic():
    event_id = async_to_sync(submit)(7)
"""
AWRITE_MANY = """Do what ``write_many`` does, in Django's thread-sensitive thread.

Raises the same errors as ``write``. A transaction must be open in that thread.
"""
AWRITE_MANY_EXAMPLE = """
async def submit_all(orders):
    return await outbox.awrite_many(
        [outbox.Event(event_type="order.submitted", payload={"order": each}) for each in orders]
    )


with transaction.atomic():
    event_ids = async_to_sync(submit_all)([8, 9])
"""
GLOBAL = """``"__GLOBAL__"``, the aggregate type of events that do not belong to an aggregate."""
GLOBAL_EXAMPLE = """
event = outbox.Event(event_type="shop.opened")
assert event.aggregate_type == outbox.GLOBAL
"""
ANY = """The default of ``aggregate_type`` for listeners: it matches every aggregate type."""
ANY_EXAMPLE = """
@outbox.listener("note.added", aggregate_type=outbox.ANY, name="audit")
def audit(event):
    print(event.aggregate_type, event.aggregate_id)
"""
DRAIN_EXAMPLE = """
with transaction.atomic():
    event_id = outbox.write("order.placed", {"order": 7})
count = outbox.drain()
"""
WORKER_EXAMPLE = """
def work_until(stop_requested):  # a threading.Event
    with outbox.Worker(workers=2) as worker:
        stop_requested.wait()
        print(worker.depths())
"""
OUTCOME = """The outcome of a message: the type of each item that ``Backend.publish`` returns.

None if the broker has confirmed the message. ``Defer`` and ``Dead`` act as if a listener had
returned them. An exception counts as raised for this event alone: ``BrokerUnavailable``,
``Unconfirmed``, ``RetryAfter``, ``Unrecoverable`` (dead at once). For any other, the relay's retry
policy decides.
"""
OUTCOME_EXAMPLE = """
def outcome_of(status: int) -> Outcome:
    return None if status == 200 else outbox.Unrecoverable(f"the broker answered {status}")
"""
SIGNALS = """All signals are stable: ``event_written``, ``event_queued``, ``event_dropped``,
``events_claimed``, ``event_started``, ``event_decided``, ``batch_called``, ``relay_published``,
``listener_overdue``, ``event_settled``, ``event_dead``, ``event_rescued``, ``lease_lost``,
``events_replayed``, ``events_discarded``, ``events_purged``, ``delivery_paused``,
``delivery_resumed``, ``breaker_opened``, ``breaker_closed``, ``worker_started``,
``worker_stopped``.

Each is a ``django.dispatch.Signal``. A receiver gets ``sender`` (the database alias) and the
arguments in the list of signals. Its errors are logged and have no other effect.
"""
SIGNALS_EXAMPLE = """
def count_dead(sender, event, cause, **kwargs):
    print(sender, event.event_type, cause)


event_dead.connect(count_dead)
"""
STATUS_EXAMPLE = """
report = status("default")
print(report["counts"]["DEAD"], report["oldest_due_age"])
"""

CHAPTERS: dict[str, list[Entry]] = {
    "writing": [
        top("write", see=f"{WRITE} and [Hook into writing](../how-to/hook-into-writing.md)"),
        top("write_many", see=WRITE),
        top("cancel", see=WRITE),
        top("reschedule", see=WRITE),
        top(
            "awrite",
            signature="async awrite(event_type, payload=None, ...) -> str | None",
            text=AWRITE,
            example=AWRITE_EXAMPLE,
            see="[Write from async code](../how-to/write-events.md#async-code)",
        ),
        top(
            "awrite_many",
            signature="async awrite_many(events: Iterable[Any], *, using: str | None = None) "
            "-> list[str]",
            text=AWRITE_MANY,
            example=AWRITE_MANY_EXAMPLE,
            see="[Write from async code](../how-to/write-events.md#async-code)",
        ),
        top("OutboxSignal", methods=("send", "send_robust", "asend", "asend_robust"), see=SIGNAL),
        error(
            "Event",
            signature="Event(*, event_type, payload=None, ...)",
            methods=("from_json", "payload_as", "is_delayed"),
            see="[Forward an event](../how-to/write-events.md#forward-an-event)",
        ),
        top("event", see="[Type events](../how-to/type-events.md)"),
        error("GLOBAL", text=GLOBAL, example=GLOBAL_EXAMPLE, see=WRITE),
    ],
    "listening": [
        top(
            "listener",
            see=f"{LISTEN}, [Deliver in batches](../how-to/deliver-in-batches.md), "
            "[Queues](../how-to/separate-slow-listeners.md) and "
            "[Fall back](../how-to/retry.md#fall-back-when-a-listener-fails-for-good)",
        ),
        error("ANY", text=ANY, example=ANY_EXAMPLE, see=LISTEN),
        top("Done", heading="`Done()`", see=LISTEN),
        top("Defer", see=LISTEN),
        top("Dead", see=LISTEN),
        error("Failure", see=FALLBACK),
        top("RetryAfter", see=RAISED),
        error("Unrecoverable", see=RAISED),
        error("BrokerUnavailable", see=RAISED),
        error(
            "RetryPolicy",
            signature="",
            methods=("max_attempts", "should_retry", "delay"),
            see=RETRY,
        ),
        top("Exponential", see=RETRY),
        top("Fixed", see=RETRY),
        top("Linear", see=RETRY),
        top("Jittered", see=RETRY),
    ],
    "delivering": [
        top(
            "drain",
            example=DRAIN_EXAMPLE,
            see="[Without a worker](../how-to/go-to-production.md#without-a-worker)",
        ),
        top("current_event", see=LISTEN),
        top("fate", see="[`--event`](commands.md#outbox_status)"),
        named("django_outbox:Fate", signature="", see="[`--event`](commands.md#outbox_status)"),
        top("Worker", example=WORKER_EXAMPLE, methods=("depths", "is_spent"), see=EMBED),
    ],
    "receiving": [
        called(
            "django_outbox.inbox:once",
            heading="`inbox.once(…)`",
            see="[Idempotent consumers](../how-to/receive-messages.md)",
        )
    ],
    "events": [
        Entry(
            path="django_outbox.models.event_queryset:OutboxQuerySet",
            signature="",
            methods=tuple(
                "of_event with_ids pending due leased held done dead expired replay "
                "replay_batches deliver_to discard discard_batches run_now skip release purge "
                "counts_by_status oldest_pending_age".split()
            ),
            see="[Replay dead events](../how-to/replay-dead-events.md)",
        )
    ],
    "streams": [
        Entry(
            path="django_outbox.models.stream_queryset:StreamQuerySet",
            signature="",
            methods=tuple("due leased held blocked heads summaries release expired purge".split()),
            see="[Deliver in order](../how-to/deliver-in-order.md)",
        )
    ],
    "messages": [
        Entry(
            path="django_outbox.models.retention:InboxQuerySet",
            signature="",
            methods=("expired", "purge"),
            see="[Idempotent consumers](../how-to/receive-messages.md)",
        )
    ],
    "pauses": [
        Entry(
            path="django_outbox.models.pause_queryset:PauseQuerySet",
            signature="",
            stable=False,
            methods=("pause", "resume"),
            see=PAUSE,
        ),
        Entry(
            path="django_outbox.models.operation:OperationQuerySet",
            signature="",
            stable=False,
            methods=("open", "begin", "stop"),
            see="[outbox_operation](tables.md#outbox_operation)",
        ),
    ],
    "status": [
        called(
            "django_outbox.inspection.overview:status",
            example=STATUS_EXAMPLE,
            see="[the keys of the report](commands.md#outbox_status)",
        )
    ],
    "relays": [
        named(
            "django_outbox.relays:Backend",
            methods=("__init__", "open", "prepare", "publish", "check", "close", "quote"),
            see=BACKEND,
        ),
        named("django_outbox.relays:Message", see=BACKEND),
        named(
            "django_outbox.relays:Outcome",
            signature="",
            text=OUTCOME,
            example=OUTCOME_EXAMPLE,
            see=BACKEND,
        ),
        named("django_outbox.relays:Unconfirmed", see=BACKEND),
    ],
    "signals": [
        Entry(
            path="django_outbox:signals",
            signature="",
            text=SIGNALS,
            example=SIGNALS_EXAMPLE,
            see="[Signals](signals.md)",
        )
    ],
    "serializer": [
        named(
            "django_outbox.hooks:JSON",
            signature="",
            stable=False,
            methods=("dumps", "loads"),
            see="[Choose a serializer](../how-to/type-events.md#choose-a-serializer)",
        )
    ],
    "tasks": [
        named(
            "django_outbox.contrib.tasks:OutboxBackend",
            signature="",
            see="[Run Django tasks](../how-to/migrate-from-a-task-queue.md#run-django-tasks)",
        )
    ],
    "logs": [
        of_contrib("logs", "JSONFormatter", signature="", see="[Log lines](logs.md)"),
        of_contrib("logs", "ContextFilter", signature="", stable=False, see=CONTEXT),
        of_contrib("logs", "context", stable=False, see=CONTEXT),
        of_contrib("logs", "remember", stable=False, see=CONTEXT),
        of_contrib("logs", "restore", stable=False, see=CONTEXT),
    ],
    "opentelemetry": [
        of_contrib("opentelemetry", "remember", stable=False, see=TRACE),
        of_contrib("opentelemetry", "remember_baggage", stable=False, see=TRACE),
        of_contrib("opentelemetry", "restore", stable=False, see=TRACE),
    ],
    "prometheus": [
        of_contrib("prometheus", "serve", stable=False, see="[Metrics](metrics.md#turn-them-on)")
    ],
    "testing": [
        called(TESTING + "capture_events", level=0, see=TEST),
        called(TESTING + "assert_event_written", level=0, see=TEST),
        called(TESTING + "make_event", level=0, see=TEST),
        called(TESTING + "capture_relayed", level=0, see=TEST),
        named(TESTING + "send_relayed", level=0, see=TEST),
        called(TESTING + "drain", heading="`testing.drain(…)`", level=0, see=TEST),
        called(TESTING + "immediate_delivery", level=0, see=TEST),
        named(TESTING + "accept_test_transaction", level=0, see=TEST),
        called(TESTING + "pass_time", level=0, see=TEST),
        called(TESTING + "running_worker", level=0, see=TEST),
        called(TESTING + "wait_until", level=0, see=TEST),
        named(TESTING + "Relayed", signature="", level=0, see=TEST),
        named(TESTING + "Written", signature="", level=0, see=TEST),
    ],
    "fixtures": [
        named("django_outbox.pytest_plugin:outbox_events", signature="", level=0, see=TEST),
        named(
            "django_outbox.pytest_plugin:outbox_worker",
            signature="",
            stable=False,
            level=0,
            see=TEST,
        ),
    ],
    "errors": [
        error("OutboxError", signature="", see=ERRORS),
        error("NoActiveTransaction", signature="", see=ERRORS),
        error("InvalidEvent", signature="", see=ERRORS),
        error("PayloadTooLarge", signature="", see=ERRORS),
        error("DuplicateEvent", signature="", see=ERRORS),
        error("ListenerAlreadyRegistered", signature="", see=ERRORS),
        error("UnroutableEvent", signature="", see=ERRORS),
        error("PayloadError", signature="", see=ERRORS),
        error("ListenerTimeout", signature="", see=ERRORS),
    ],
}
