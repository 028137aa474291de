"""Events with a key: their drain and their write beside events without; a key that is blocked."""

from __future__ import annotations

import itertools

from django.db import connection

import django_outbox as outbox
from django_outbox.models import OutboxEvent, OutboxStream

from . import backlog
from .drain import drain
from .figures import Figure, in_turn
from .payload import PAYLOAD
from .scale import Scale
from .witness import Witness
from .write import in_blocks, make_plain_table

LETTER = "A"  # begins the keys that are drained; the blocked one begins with another


def run(scale: Scale, witness: Witness) -> list[Figure]:
    def by(per_key: int, *, blocked: int = 0) -> float:
        backlog.fill(scale.keyed_events, per_key=per_key)
        if blocked:
            block(blocked)
        return drain(scale.keyed_events, witness, keys=LETTER if per_key else "")

    found = in_turn(
        {
            "none": lambda: by(0),
            "many": lambda: by(100),
            "one": lambda: by(1),
            "blocked": lambda: by(100, blocked=scale.blocked_rows),
        },
        scale.repeats,
    )
    name = f"drain of {scale.keyed_events:,} events"
    return [
        Figure(
            name=f"{name}, 100 of each key",
            unit="events/s",
            values=found["many"],
            reference="without keys",
            references=found["none"],
        ),
        Figure(
            name=f"{name}, one of each key",
            unit="events/s",
            values=found["one"],
            reference="without keys",
            references=found["none"],
            bar="" if connection.vendor == "sqlite" else "≥ 0.6",
        ),
        Figure(
            name=f"{name}, 100 of each key, {scale.blocked_rows:,} behind a blocked one",
            unit="events/s",
            values=found["blocked"],
            reference="without the blocked key",
            references=found["many"],
        ),
        written(scale),
    ]


def block(events: int) -> None:
    """Leave a key as a failing head does: its stream due again in an hour, followers behind it."""
    backlog.insert(events, due=backlog.DUE, letter="B", text=backlog.TEXT, per_key=events)
    with connection.cursor() as cursor:
        streams = connection.ops.quote_name(OutboxStream._meta.db_table)
        key = connection.ops.quote_name("key")
        later = backlog.after(3600)
        cursor.execute(f"UPDATE {streams} SET due_at = {later} WHERE {key} LIKE 'B%%'", [])
        cursor.execute(
            f"UPDATE {OutboxEvent._meta.db_table} SET status = 2, attempts = 1 "
            f"WHERE {key} LIKE 'B%%' AND seq = 1",
            [],
        )
    backlog.analyze()


def written(scale: Scale) -> Figure:
    """A keyed write takes a place in its stream: one more row in the same statement or the next."""

    def event() -> None:
        outbox.write("order.placed", PAYLOAD)

    numbers = itertools.cycle(range(100))

    def keyed_event() -> None:
        outbox.write("order.placed", PAYLOAD, key=f"order-{next(numbers)}")

    make_plain_table()
    found = in_blocks({"event": event, "keyed_event": keyed_event}, scale)
    return Figure(
        name="a transaction with write(key=…)",
        unit="µs",
        values=found["keyed_event"],
        reference="the same without a key",
        references=found["event"],
    )
