"""An outbox as an operator may meet it at three in the morning, and one dead event."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

from django_outbox.events import LENGTHS
from django_outbox.listeners import registry
from django_outbox.listeners.history import Entry
from django_outbox.listeners.outcomes import Status
from django_outbox.models import (
    OutboxEvent,
    OutboxPause,
    OutboxStatistics,
    OutboxStream,
    OutboxWorker,
)
from django_outbox.models.statistics import BOUNDS, bucket
from tests.table import insert, keyed, note, now

TYPES = {  # deliveries a minute, seconds they wait, seconds they run
    "order.placed": (42, 0.006, 0.02),
    "order.paid": (38, 0.006, 0.08),
    "parcel.requested": (35, 0.008, 0.35),
    "invoice.sent": (12, 0.01, 1.4),
}
HOSTS = ("web-1.shop.internal", "web-2.shop.internal", "worker-1.shop.internal")
CHANCE = random.Random(41)


@contextmanager
def listeners() -> Iterator[None]:
    """Have the shop's listeners registered for the length of a block."""
    made = [_listener(event_type) for event_type in TYPES]
    options: list[dict[str, Any]] = [{}, {"atomic": True}, {"timeout": 30}, {}]
    for event_type, call, given in zip(TYPES, made, options, strict=True):
        registry.listener(event_type, **given)(call)
    try:
        yield
    finally:
        for call in made:
            registry.remove(call)


def _listener(event_type: str) -> Callable[[Any], None]:
    def listen(event: Any) -> None:
        """Nobody calls it."""

    listen.__module__ = "shop.listeners"
    listen.__qualname__ = event_type.replace(".", "_")
    return listen


def at_three_in_the_morning() -> list[str]:
    """The courier's interface fails: retries, dead events, a blocked stream, a silent worker."""
    _history()
    running = {"event_type": "parcel.requested", "id": "", "seconds": 312.0}
    stuck = insert(2, due=25, event_type="parcel.requested", locked_by="w", locked_at=now())
    _worker(HOSTS[0], 4000, held=2, age=3, running=[{**running, "id": stuck[0]}])
    _worker(HOSTS[1], 4001, held=1, age=6, running=[{**running, "id": stuck[1], "seconds": 4}])
    _worker(HOSTS[2], 4002, held=214, age=95)
    insert(180, due=-740, event_type="parcel.requested")
    insert(64, due=-35, event_type="order.paid")
    insert(37, due=90, event_type="parcel.requested", status=Status.RETRY, attempts=4)
    insert(12, due=1800, event_type="invoice.sent")
    _dead("parcel.requested", "ConnectionError: courier.example refused", 23)
    _dead("parcel.requested", "ListenerTimeout: parcel.requested ran longer than 30 s", 4)
    _dead("invoice.sent", "ValidationError: no address for customer 1182", 2)
    for number in range(3):
        key = f"customer-{1180 + number}"
        keyed(key, 4 + 9 * number, due=240, event_type="parcel.requested")
        OutboxEvent.objects.filter(key=key, seq=1).update(
            status=Status.RETRY,
            attempts=7,
            first_due_at=now() - timedelta(minutes=13),
            last_error="ConnectionError: courier.example refused\nTraceback",
        )
    insert(9, event_type="coupon.redeemed", due=-20)
    return []


def in_trouble() -> list[str]:
    """All goes wrong: 30 blocked streams, 40 causes, 3 pauses, 5 workers of which 2 are lost."""
    _history()
    stuck = insert(3, due=25, event_type="parcel.requested", locked_by="w", locked_at=now())
    for number, age in enumerate((2, 4, 5, 200, 4000)):
        running = {"event_type": "parcel.requested", "id": stuck[number % 3], "seconds": 9.0}
        _worker(
            f"worker-{number + 1}.shop.internal",
            4000 + number,
            held=3,
            age=age,
            running=[running] * (number % 3 + 1),
        )
    insert(180, due=-740, event_type="parcel.requested")
    for number in range(12):
        insert(
            20 - number,
            due=90 * number - 200,
            event_type=f"order.step_{number}",
            status=Status.RETRY,
            attempts=4,
        )
    for number in range(40):
        _dead(
            ("parcel.requested", "invoice.sent", "order.paid")[number % 3],
            f"{'Connection' if number % 2 else 'Validation'}Error: {WORDS[number % 8]} "
            f"{WORDS[number // 8]} of the courier's interface at https://courier.example/v2/ "
            "refused the request: service unavailable",
            40 - number,
        )
    for number in range(30):
        keyed(f"customer-{1180 + number}", 4, due=240, event_type="parcel.requested")
    OutboxEvent.objects.filter(key__startswith="customer-", seq=1).update(
        status=Status.RETRY,
        attempts=7,
        first_due_at=now() - timedelta(minutes=13),
        last_error="ConnectionError: courier.example refused\nTraceback",
    )
    for kind, name in (
        ("event_type", "coupon.redeemed"),
        ("event_type", "invoice.sent"),
        ("stream", "customer-1180"),
    ):
        OutboxPause.objects.pause(kind, name, reason="the courier is away until nine", by="ada")
    return []


def the_drill() -> str:
    """The partner is away: 5,000 dead events, a lost worker, and a poison event; return its id."""
    clock = now()
    start = clock.replace(second=0, microsecond=0) - timedelta(minutes=1)
    OutboxStatistics.objects.create(
        started_at=start,
        owner=HOSTS[0],
        listener="parcel.requested",
        done=0,
        retry=900,
        dead=5000,
        rescued=2,
    )
    insert(
        5000,
        due=None,
        event_type="parcel.requested",
        status=Status.DEAD,
        attempts=10,
        done_at=clock - timedelta(minutes=1),
        last_error="ConnectionError: courier.example refused",
    )
    keyed("customer-1", 3, due=240, event_type="order.paid")
    OutboxEvent.objects.filter(key="customer-1", seq=1).update(
        status=Status.RETRY, attempts=7, last_error="TimeoutError: the bank does not answer"
    )
    (poison,) = insert(due=20, event_type="order.placed", locked_by="w", locked_at=clock)
    for number, host in enumerate(HOSTS[1:], start=1):
        at = clock - timedelta(seconds=90 - number)
        note(poison, Entry(at=at, kind="lost", number=number, by=f"{host}-4000-7f3a"))
    OutboxEvent.objects.filter(pk=poison).update(rescues=2)
    _worker(HOSTS[0], 4000, held=1, age=3)
    _worker(HOSTS[1], 4000, held=1, age=95)
    return str(poison)


WORDS = ("north", "east", "south", "west", "red", "green", "blue", "grey")


def a_refused_parcel() -> list[str]:
    """Leave what the tutorial's courier does: one dead event, whose id is returned."""
    clock = now()
    died = clock - timedelta(minutes=3)
    ids = insert(
        due=None,
        event_type="parcel.requested",
        listener="parcel.requested",
        aggregate_type="shop.Order",
        aggregate_id="2",
        payload='{"order":2,"to":"Ada","skus":["spirit-burner"]}',
        status=Status.DEAD,
        attempts=4,
        occurred_at=died - timedelta(seconds=1.6),
        created_at=died - timedelta(seconds=1.6),
        first_due_at=died - timedelta(seconds=1.6),
        done_at=died,
        last_error=REFUSED,
    )
    note(
        ids[0],
        *(
            Entry(
                at=died - timedelta(seconds=1.6 - 0.2 * number**1.5),
                kind="dead" if number == 4 else "failed",
                number=number,
                milliseconds=8 * number,
                by="worker-1.shop.internal-4002-7f3a",
                listener="parcel.requested",
                error=REFUSED.partition("\n")[0],
            )
            for number in range(1, 5)
        ),
    )
    return ids


SAID = "The courier does not carry spirit-burner (flammable) to Ada."
REFUSED = f"""\
example_project.partners.models.PartnerError: {SAID}
Traceback (most recent call last):
  File "/srv/shop/example_project/warehouse/listeners.py", line 27, in book_parcel
    tracking_number = courier.book(
                      ^^^^^^^^^^^^^
  File "/srv/shop/example_project/partners/courier.py", line 17, in book
    raise PartnerError(f"The courier does not carry {{refused}} to {{to}}.")
example_project.partners.models.PartnerError: {SAID}
"""


def _worker(
    host: str, pid: int, *, held: int, age: float, running: list[Any] | None = None
) -> None:
    clock = now()
    OutboxWorker.objects.create(
        id=f"{host}-{pid}-7f3a",
        hostname=host,
        pid=pid,
        started_at=clock - timedelta(hours=31, minutes=pid % 60),
        heartbeat_at=clock - timedelta(seconds=age),
        info=json.dumps(
            {
                "mode": "multi_node",
                "held": held,
                "running": running or [],
                "threads": {"default": [4 if running else 1, 4]},
            }
        ),
    )


def _dead(event_type: str, error: str, count: int) -> None:
    insert(
        count,
        due=None,
        event_type=event_type,
        status=Status.DEAD,
        attempts=10,
        done_at=now() - timedelta(minutes=CHANCE.randint(1, 40)),
        last_error=f"{error}\nTraceback (most recent call last): …",
    )


def _history() -> None:
    """The statistics of an hour, as workers would have written them, the same at each call."""
    CHANCE.seed(41)
    clock = now().timestamp()
    rows = []
    for back in range(62):
        start = clock // 60 * 60 - back * 60
        age = clock - start  # seconds
        bad = 1.0 if age < 14 * 60 else 0.0
        for host in HOSTS:
            rows += [_row(start, age, host, *each, bad) for each in TYPES.items()]
    OutboxStatistics.objects.bulk_create(rows, batch_size=500)


def _row(
    start: float, age: float, host: str, event_type: str, given: tuple[float, ...], bad: float
) -> OutboxStatistics:
    rate, wait, run = given
    tide = 0.65 - 0.35 * math.sin(2 * math.pi * (age / 86400 + 0.175))  # of three in the morning
    count = max(int(rate * tide * CHANCE.uniform(0.85, 1.15) / len(HOSTS)), 1)
    at = datetime.fromtimestamp(start, timezone.utc)
    row = OutboxStatistics(started_at=at, owner=host, listener=event_type)
    hit = bad and event_type == "parcel.requested"
    row.retry = int(count * (0.75 if hit else 0.01 * CHANCE.random()))
    row.dead = CHANCE.randint(1, 2) if hit else 0
    row.done = max(count - row.retry - row.dead, 0)
    for name, middle in (("wait", wait * (1 + 900 * bad)), ("run", run * (12 if hit else 1))):
        for part, sigma in ((0.55, 0.3), (0.33, 1.0), (0.09, 2.2), (0.03, 4.5)):
            place = bucket(min(middle * sigma * CHANCE.uniform(0.7, 1.3), BOUNDS[-1]))
            field = f"{name}_{place}"
            setattr(row, field, getattr(row, field) + max(int(count * part), 1))
            row.run_ms += round(count * part * middle * sigma * 1000) * (name == "run")
    return row


TEXTS = "payload headers result last_error".split()


def evil(text: str) -> None:
    """Fill every text column of every table with it."""
    short = dict.fromkeys(("event_type", "aggregate_type", "aggregate_id", "tenant_id"), text)
    short = {name: each[: LENGTHS[name]] for name, each in short.items()}
    quoted = json.dumps({text: text})
    clock = now()
    common = {**short, "locked_at": clock, "key": text, "listener": text, "routes": text}
    insert(
        event_id="<b class=xss>'\"><script>",
        due=None,
        done_at=clock,
        seq=1,
        attempts=3,
        status=Status.DEAD,
        unique_key=text,
        locked_by=text,
        **{**common, **dict.fromkeys(TEXTS, text)},
    )
    insert(
        due=60,
        status=Status.RETRY,
        seq=2,
        locked_by=text,
        **{**common, **dict.fromkeys(TEXTS, quoted)},
    )
    OutboxStream.objects.create(
        stream=f":{text}", key=text, seq=2, due_at=clock, locked_by=text, locked_at=clock
    )
    for each in OutboxPause.Kind.values:
        OutboxPause.objects.create(
            kind=each, name=text, reason=text, paused_by=text, paused_at=clock
        )
    running = [{"event_type": text, "id": text, "seconds": 312.0}]
    OutboxWorker.objects.create(
        id=text,
        hostname=text,
        pid=1,
        started_at=clock,
        heartbeat_at=clock,
        info=json.dumps({"mode": text, "held": 1, "running": running}),
    )
    started = clock.replace(second=0, microsecond=0)
    OutboxStatistics.objects.create(
        started_at=started, owner=text, listener=text[:255], done=1, dead=1
    )
