"""What ``write`` adds to a business transaction, beside one more plain row; ``write_many``."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timezone

from django.db import connection, transaction

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from tests.testapp.models import Order

from . import backlog
from .figures import Figure
from .payload import PAYLOAD
from .scale import Scale
from .witness import Witness

PLAIN = "benchmark_plain"  # of the same columns and indexes as the outbox
BLOCK = 20  # transactions of one kind before the next kind has its turn
MANY = 100
COLUMNS = (
    "id event_id event_type aggregate_type payload status attempts rescues "
    "occurred_at created_at first_due_at available_at"
).split()
INSERT = f"INSERT INTO {PLAIN} ({', '.join(COLUMNS)}) VALUES ({', '.join(['%s'] * len(COLUMNS))})"


def run(scale: Scale, witness: Witness) -> list[Figure]:
    make_plain_table()
    adapt = connection.ops.adapt_datetimefield_value

    def nothing() -> None:
        pass

    def plain_row() -> None:
        now = adapt(datetime.now(timezone.utc))
        name = str(uuid.uuid4())
        row = [name, name, "order.placed", "shop.Order", json.dumps(PAYLOAD), 0, 0, 0]
        with connection.cursor() as cursor:
            cursor.execute(INSERT, [*row, now, now, now, now])

    def event() -> None:
        outbox.write("order.placed", PAYLOAD)

    kinds = {"nothing": nothing, "plain_row": plain_row, "event": event}
    added = in_blocks(kinds, scale)
    several = {"write_many": write_many, "bulk_create": bulk_create}
    many = in_blocks(several, replace(scale, transactions=max(10, scale.transactions // 10)))
    most = "≤ 1.10"
    return [
        figure("with write", added["event"], "with one more plain row", added["plain_row"], most),
        figure("with write", added["event"], "without it", added["nothing"]),
        figure(
            f"with write_many({MANY})",
            many["write_many"],
            f"with bulk_create({MANY})",
            many["bulk_create"],
            "≤ 0.8" if connection.vendor == "postgresql" else "",
        ),
    ]


def figure(
    name: str, values: list[float], reference: str, references: list[float], bar: str = ""
) -> Figure:
    return Figure(
        name=f"a transaction {name}",
        unit="µs",
        values=values,
        bar=bar,
        reference=f"the same {reference}",
        references=references,
    )


def write_many() -> None:
    outbox.write_many(
        [outbox.Event(event_type="order.placed", payload=PAYLOAD) for _ in range(MANY)]
    )


def bulk_create() -> None:
    now = datetime.now(timezone.utc)
    OutboxEvent.objects.bulk_create(
        OutboxEvent(
            id=(name := str(uuid.uuid4())),
            event_id=name,
            event_type="order.placed",
            payload=json.dumps(PAYLOAD),
            occurred_at=now,
            created_at=now,
            first_due_at=now,
            available_at=now,
        )
        for _ in range(MANY)
    )


def in_blocks(kinds: Mapping[str, Callable[[], None]], scale: Scale) -> dict[str, list[float]]:
    """Return microseconds a transaction: an order, and one kind of addition. Blocks take turns."""
    found: dict[str, list[float]] = {name: [] for name in kinds}
    blocks = scale.transactions // BLOCK or 1
    for _ in range(scale.repeats + 1):
        clear()
        spent = dict.fromkeys(kinds, 0.0)
        for block in range(blocks):
            for name in kinds if block % 2 else reversed([*kinds]):
                spent[name] += timed(kinds[name])
        for name, seconds in spent.items():
            found[name].append(1e6 * seconds / (BLOCK * blocks))
    return {name: values[1:] for name, values in found.items()}  # the first round is a warm-up


def timed(kind: Callable[[], None]) -> float:
    started = time.perf_counter()
    for _ in range(BLOCK):
        with transaction.atomic():
            Order.objects.create(sku="teapot", quantity=3)
            kind()
    return time.perf_counter() - started


def clear() -> None:
    backlog.empty()
    backlog.execute(f"DELETE FROM {PLAIN}")
    Order.objects.all().delete()


def make_plain_table() -> None:
    """Make a table like the outbox's, indexes and all, with the least that is NOT NULL."""
    if connection.vendor != "sqlite":
        like = "LIKE {}" if connection.vendor == "mysql" else "(LIKE {} INCLUDING ALL)"
        backlog.execute(f"CREATE TABLE {PLAIN} {like.format(backlog.TABLE)}")
        return
    with connection.cursor() as cursor:
        cursor.execute("SELECT sql FROM sqlite_master WHERE tbl_name = %s", [backlog.TABLE])
        made = [sql for (sql,) in cursor.fetchall() if sql]
    for sql in made:
        backlog.execute(sql.replace(backlog.TABLE, PLAIN).replace('INDEX "', f'INDEX "{PLAIN}_'))
