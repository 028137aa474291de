"""Print the table of a demonstration, and compare the outcome with what was expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median

from django.conf import settings
from django.contrib.admin.models import LogEntry
from django.db.models import Model

from django_outbox.models import OutboxEvent
from example_project.partners.models import Call
from example_project.shop.models import Order, Payment
from example_project.warehouse.models import Parcel, PickList

TYPES = ("order.placed", "payment.requested", "parcel.requested")
TRIES = settings.OUTBOX["RETRY"]["max_attempts"]
ROW = "{:<18} {:>7} {:>9} {:>7} {:>4} {:>8} {:>7} {:>7}"
TITLES = ("event", "written", "delivered", "retries", "dead", "replayed", "p50 ms", "max ms")


@dataclass(slots=True)
class Facts:
    """What was seen on the way and cannot be read from the tables afterwards."""

    orders: int = 0
    committed: dict[str, datetime] = field(default_factory=dict)  # by order number
    stock_moved_by_refused_order: int | None = None
    retries: Counter[str] = field(default_factory=Counter)  # by event type, as all the following
    died: Counter[str] = field(default_factory=Counter)
    replayed: Counter[str] = field(default_factory=Counter)
    exit_code: int | None = None
    complaints: list[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    says: str
    found: object
    wanted: object

    @property
    def holds(self) -> bool:
        return bool(self.found == self.wanted)

    def __str__(self) -> str:
        if self.holds:
            return f"  ok      {self.says}"
        return f"  FAILED  {self.says}: found {self.found!r}, expected {self.wanted!r}"


def print_table(facts: Facts) -> None:
    late = latencies(facts.committed)
    print(ROW.format(*TITLES))
    for event_type in TYPES:
        print_row(event_type, facts, [event_type], late[event_type])
    print_row("all", facts, TYPES, [each for times in late.values() for each in times])
    print(
        "\nretries: executions after an event's first; dead: before the replay;"
        "\np50 and max: from the COMMIT to the listener, first execution\n"
    )


def print_row(title: str, facts: Facts, types: Sequence[str], late: list[float]) -> None:
    events = OutboxEvent.objects.filter(event_type__in=types)
    counts = (
        sum(each[one] for one in types) for each in (facts.retries, facts.died, facts.replayed)
    )
    times = (f"{median(late):.0f}", f"{max(late):.0f}") if late else ("-", "-")
    print(ROW.format(title, events.count(), events.done().count(), *counts, *times))


def latencies(committed: dict[str, datetime]) -> dict[str, list[float]]:
    """Return milliseconds from COMMIT to the first thing that the listener did, by event type."""
    seen: dict[str, datetime] = dict(PickList.objects.values_list("event_id", "created_at"))
    for call in Call.objects.order_by("pk"):
        seen.setdefault(call.idempotency_key, call.at)
    late: dict[str, list[float]] = {event_type: [] for event_type in TYPES}
    for event in OutboxEvent.objects.filter(aggregate_id__in=committed):
        if event.pk in seen:
            waited = seen[event.pk] - committed[str(event.aggregate_id)]
            late[event.event_type].append(waited.total_seconds() * 1000)
    return late


def judge(facts: Facts) -> bool:
    """Print each expectation and say whether all hold."""
    expectations = [*expected(facts)]
    for expectation in expectations:
        print(expectation)
    return all(expectation.holds for expectation in expectations)


def expected(facts: Facts) -> Iterator[Expectation]:
    for says, found, wanted in (
        (
            "every order is there, with three events",
            found_orders(),
            (facts.orders, 3 * facts.orders),
        ),
        ("the refused order has left no trace", facts.stock_moved_by_refused_order, 0),
        ("every event is delivered", undelivered(), 0),
        ("one pick list for each order", per_order(PickList, "order_number"), facts.orders),
        ("one payment for each order", per_order(Payment, "order_id"), facts.orders),
        ("one parcel for each order", per_order(Parcel, "order_number"), facts.orders),
        (
            "each charge was refused twice, then taken",
            calls("cards"),
            (2 * facts.orders, facts.orders),
        ),
        (f"the courier refused {TRIES} times, no more", calls("courier"), (TRIES, facts.orders)),
        ("the parcel with the burner died", dict(+facts.died), {"parcel.requested": 1}),
        ("its replay is in the admin's log", logged(), facts.replayed.total()),
        ("the worker ended with exit code 0", facts.exit_code, 0),
        ("the worker warned of nothing else", facts.complaints, []),
        ("nothing is left leased", OutboxEvent.objects.exclude(locked_by=None).count(), 0),
    ):
        yield Expectation(says=says, found=found, wanted=wanted)


def found_orders() -> tuple[int, int]:
    return Order.objects.count(), OutboxEvent.objects.count()


def undelivered() -> int:
    return OutboxEvent.objects.exclude(status=OutboxEvent.Status.DONE).count()


def per_order(effect: type[Model], order: str) -> int | str:
    """Return the number of orders with this effect, unless one of them has it twice."""
    rows = effect._default_manager.values_list(order, flat=True)
    return len(rows) if len(rows) == len(set(rows)) else f"an order has it twice: {sorted(rows)}"


def calls(partner: str) -> tuple[int, int]:
    """Return how often a partner refused, and how often it served."""
    made = Call.objects.filter(partner=partner)
    return made.filter(served=False).count(), made.filter(served=True).count()


def logged() -> int:
    return LogEntry.objects.filter(content_type__app_label="django_outbox").count()
