"""The bar of the console: fill a server with an incident at full size, then time its pages.

``OUTBOX_TEST_DB=postgres python -m tests.drill 1000000`` prints the milliseconds and the queries of
each page; ``OUTBOX_TEST_DB=mariadb`` likewise. The database of ``DATABASE_URL`` is kept; without
one, a private server is started, and is gone in the end.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import django

POSTGRES = {
    "series": "generate_series(1, {count}) AS n",
    "word": "translate((n + {done})::text, '0123456789', 'ghjklmnprs')",
    "later": "model.{column} + {n} * interval '{step} microseconds'",
    "id": "'{made}' || lpad(n::text, 12, '0')",
    "text": "model.{column} || ' ' || {word}",
}
MYSQL = {
    "series": "(SELECT seq AS n FROM seq_1_to_{count}) AS numbers",
    "word": "CHAR({}, {}, {}, {} USING ascii)".format(
        *(f"97 + (n + {{done}}) DIV {26**place} MOD 26" for place in range(4))
    ),
    "later": "DATE_ADD(model.{column}, INTERVAL {n} * {step} MICROSECOND)",
    "id": "CONCAT('{made}', LPAD(n, 12, '0'))",
    "text": "CONCAT(model.{column}, ' ', {word})",
}


def many(count: int, *, over: float = 0.0, made: float = 0.0, differ: bool = False, **columns: Any):
    """Insert so many rows; their times are spread over the seconds after those of the first."""
    from django.db import connection

    from django_outbox.events import least_id, new_id
    from django_outbox.models import OutboxEvent
    from tests.table import insert, now

    if count < 1:
        return
    created = now() - timedelta(seconds=made)
    (first,) = insert(1, made=made, created_at=created, **columns)
    sql = POSTGRES if connection.vendor == "postgresql" else MYSQL
    steps = min(max(int(made / 60), 1), 100)  # ids of each minute
    quote = connection.ops.quote_name
    for step in range(steps):
        size, done = count // steps, count // steps * step
        prefix = least_id(now() - timedelta(seconds=made - 60 * step))[:10] + new_id()[-4:]
        values = {each.column: f"model.{quote(each.column)}" for each in OutboxEvent._meta.fields}
        values["id"] = values["event_id"] = sql["id"].format(made=prefix)
        for name in ("available_at", "first_due_at", "done_at"):
            values[name] = sql["later"].format(
                column=quote(name), step=int(over / count * 1e6), n=f"(n + {done})"
            )
        created = sql["later"].format(column="created_at", step=60_000_000, n=step)
        values["created_at"] = created
        if differ:
            for name in ("last_error", "cause"):
                values[name] = sql["text"].format(
                    column=quote(name), word=sql["word"].format(done=done)
                )
        table, names = quote(OutboxEvent._meta.db_table), ", ".join(map(quote, values))
        with connection.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {table} ({names}) SELECT {', '.join(values.values())} "
                f"FROM {sql['series'].format(count=size)}, {table} AS model "
                f"WHERE model.id = '{first}'".replace("%", "%%"),
                [],
            )


def incident(rows: int) -> None:
    """60,000 dead, a slow type, a paused queue, a broker that is away, blocked keys, a lost worker.

    All other rows are done.
    """
    from django_outbox.listeners.outcomes import Status
    from django_outbox.models import OutboxPause
    from tests.table import keyed, now

    clock = now()
    dead: dict[str, Any] = {"due": None, "status": Status.DEAD, "attempts": 10, "made": 90_000}
    for number in range(6):
        host = f"HTTPError: 503 Server Error for url: https://{'abcdef'[number]}.example/"
        at = clock - timedelta(minutes=30 + 600 * number)
        given = {"event_type": "order.paid", "listener": "order.paid mail", "last_error": host}
        many(5000, over=600, done_at=at, tenant_id=f"t{number}", **given, **dead)
    at = clock - timedelta(minutes=50)
    given = {"event_type": "invoice.sent", "listener": "invoice.sent", "tenant_id": "north"}
    texts = {"last_error": "ValidationError: no address of", "done_at": at, "differ": True}
    many(30_000, over=2900, **texts, **given, **dead)
    slow = {"event_type": "parcel.requested", "listener": "parcel.requested"}
    many(17_000, made=3300, due=-3300, over=3290, **slow)
    many(rows // 10, made=3600, due=-7200, over=7000, event_type="hook.called", queue="hooks")
    many(20_000, made=900, due=-900, over=890, event_type="order.placed", queue="relay.orders")
    for number in range(3):
        keyed(f"customer-{1180 + number}", 40, due=240, event_type="order.paid")
    _heads_failed()
    OutboxPause.objects.pause(
        "queue", "hooks", reason="courier away", by="ada", until=clock + timedelta(hours=2)
    )
    OutboxPause.objects.filter(name="hooks").update(paused_at=clock - timedelta(minutes=40))
    OutboxPause.objects.create(
        kind="breaker",
        name="relay.orders",
        paused_at=clock - timedelta(minutes=15),
        pause_seconds=60,
        until=clock + timedelta(seconds=40),
        reason="relay.orders: no answer from kafka:9092",
    )
    _workers()
    _minutes()
    from django_outbox.models import OutboxEvent

    done = rows - OutboxEvent.objects.count()
    many(done, due=None, status=Status.DONE, made=90_000, done_at=clock - timedelta(hours=20))


def _heads_failed() -> None:
    from django_outbox.listeners.outcomes import Status
    from django_outbox.models import OutboxEvent
    from tests.table import now

    OutboxEvent.objects.filter(key__startswith="customer-", seq=1).update(
        status=Status.RETRY,
        attempts=7,
        listener="order.paid",
        first_due_at=now() - timedelta(minutes=13),
        last_error="TimeoutError: the bank does not answer",
    )


def _workers() -> None:
    from django_outbox.models import OutboxWorker
    from tests.table import now

    clock = now()
    threads = {"default": [6, 6], "hooks": [0, 2], "relay.orders": [0, 1]}
    for number, age in enumerate((3, 5, 95)):
        info = {"queues": [*threads], "threads": threads, "held": 12, "mode": "multi_node"}
        info["listeners"] = ["parcel.requested", "order.paid", "order.paid mail", "invoice.sent"]
        running = {"event_type": "parcel.requested", "id": "x", "seconds": 0.6}
        OutboxWorker.objects.create(
            id=f"worker-{number + 1}.shop.internal-4000-7f3a",
            hostname=f"worker-{number + 1}.shop.internal",
            pid=4000,
            started_at=clock - timedelta(hours=31),
            heartbeat_at=clock - timedelta(seconds=age),
            info=json.dumps({**info, "running": [running]}),
        )


def _minutes() -> None:
    """720 parcels a minute are done, of a second each: twelve threads do no more."""
    from django_outbox.models import OutboxStatistics
    from tests.table import now

    start = now().replace(second=0, microsecond=0)
    OutboxStatistics.objects.bulk_create(
        OutboxStatistics(
            started_at=start - timedelta(minutes=back),
            owner=f"worker-{owner}",
            listener=title,
            done=done,
            dead=5,
            run_ms=done * milliseconds,
            wait_16=done,
            **{f"run_{bucket}": done},
        )
        for back in range(1, 62)
        for owner in range(2)
        for title, done, milliseconds, bucket in (
            ("parcel.requested", 355, 1000, 8),
            ("order.paid mail", 20, 80, 5),
        )
    )


def listeners() -> None:
    import django_outbox as outbox

    outbox.listener("parcel.requested")(lambda event: None)
    outbox.listener("order.paid")(lambda event: None)
    outbox.listener("order.paid", name="mail")(lambda event: None)
    outbox.listener("invoice.sent")(lambda event: None)
    outbox.listener("hook.called", queue="hooks")(lambda event: None)


PAGES = {
    "now": "outboxstatistics_changelist",
    "refresh": "outboxstatistics_refresh",
    "causes": "outboxevent_groups",
    "deliveries": "outboxevent_changelist",
    "dead": "outboxevent_changelist?state=dead",
    "of a cause": "outboxevent_changelist?state=dead&cause=",
    "replay a cause": "outboxevent_replay_all?state=dead&cause=",
    "of a tenant": "outboxevent_changelist?q=north",
    "of nobody": "outboxevent_changelist?q=nobody",
    "paused": "outboxevent_changelist?state=paused",
    "operations": "outboxoperation_changelist",
    "pauses": "outboxpause_changelist",
    "streams": "outboxstream_changelist",
}


def timed(client: Any, url: str) -> tuple[float, int, int]:
    """Return the median milliseconds of five visits, the queries and the bytes of one."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    took = []
    for _ in range(5):
        started = time.perf_counter()
        found = client.get(url)
        took.append(time.perf_counter() - started)
        assert found.status_code == 200, found
    with CaptureQueriesContext(connection) as queries:
        found = client.get(url)
    if os.environ.get("DRILL_QUERIES"):
        for each in sorted(queries.captured_queries, key=lambda each: -float(each["time"]))[:6]:
            print("   ", each["time"], " ".join(each["sql"].split())[:300])
    return statistics.median(took) * 1000, len(queries), len(found.content)


def main() -> None:
    """Fill the database, and print what each page costs."""
    django.setup()
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.db import connection
    from django.test import Client
    from django.test.utils import override_settings
    from django.urls import reverse

    from django_outbox.inspection.causes import load_causes
    from django_outbox.inspection.overview import status

    relay = {"BACKEND": "tests.relay_backend.InMemory", "EVENTS": ["order.placed"]}
    listeners()
    given = {"QUEUES": {"hooks": {}}, "RELAYS": {"orders": relay}}
    with override_settings(OUTBOX=given, ALLOWED_HOSTS=["*"]):
        call_command("migrate", verbosity=0)
        user, is_new = User.objects.get_or_create(username="operator")
        if is_new:
            User.objects.filter(pk=user.pk).update(is_superuser=True, is_staff=True)
            incident(int(sys.argv[1]))
            with connection.cursor() as cursor:
                for table in ("outbox_event", "outbox_stream", "outbox_statistics"):
                    is_mysql = connection.vendor == "mysql"
                    cursor.execute(f"{'ANALYZE TABLE' if is_mysql else 'VACUUM ANALYZE'} {table}")
                    cursor.fetchall() if is_mysql else None
        client = Client()
        client.force_login(User.objects.get())
        digest = load_causes("default", 1).causes[0].digest
        for name, page in PAGES.items():
            view, mark, query = page.partition("?")
            url = f"{reverse(f'admin:django_outbox_{view}')}{mark}{query}"
            url += digest * url.endswith("cause=")
            milliseconds, queries, size = timed(client, url)
            print(f"{name:14} {milliseconds:6.0f} ms {queries:3} queries {size // 1000:4} KB")
        for each in status("default")["problems"]:
            print(each["text"])


if __name__ == "__main__":
    main()
