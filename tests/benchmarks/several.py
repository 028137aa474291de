"""What further listeners of an event cost: its write, its drain, and what the database stores."""

from __future__ import annotations

from functools import partial

from django.db import connection, transaction

import django_outbox as outbox

from . import backlog
from .drain import WARM_UP
from .figures import Figure, in_turn
from .listeners import SEVERAL
from .payload import PAYLOAD
from .scale import Scale
from .witness import STEP, Witness
from .workers import WorkerProcess
from .write import in_blocks, make_plain_table

AT_ONCE = 500  # events in one call of write_many
SIZES = {  # bytes of the table with its indexes
    "postgresql": "SELECT pg_total_relation_size('{}')",
    "mysql": "SELECT data_length + index_length FROM information_schema.tables "
    "WHERE table_schema = DATABASE() AND table_name = '{}'",
}

WAL = "SELECT pg_current_wal_lsn() - '0/0'::pg_lsn"  # bytes so far


def run(scale: Scale, witness: Witness) -> list[Figure]:
    """Compare three and ten listeners with one."""
    make_plain_table()
    events = scale.events // 10
    names = {count: f"with write, {count} listeners" for count in SEVERAL}
    written = in_blocks({names[count]: partial(write, count) for count in SEVERAL}, scale)
    drained = in_turn({str(n): partial(drain, n, events, witness) for n in SEVERAL}, scale.repeats)
    found = []
    for count in SEVERAL[1:]:
        found.append(
            Figure(
                name=f"a transaction {names[count]}",
                unit="µs",
                values=written[names[count]],
                references=written[names[1]],
                reference="the same with one",
                bar="" if count > 3 else "≤ 1.6" if connection.vendor == "sqlite" else "≤ 1.1",
            )
        )
        found.append(
            Figure(
                name=f"drain of {events:,} events, {count} listeners",
                unit="events/s",
                values=drained[str(count)],
                references=drained["1"],
                reference="one listener",
            )
        )
    for count in SEVERAL:
        found += stored(count, events, witness)
    return found


def write(count: int) -> None:
    outbox.write(f"benchmark.count_{count}", PAYLOAD)


def fill(count: int, events: int) -> None:
    backlog.empty()
    kind = f"benchmark.count_{count}"
    for start in range(0, events, AT_ONCE):
        with transaction.atomic():
            new = range(min(AT_ONCE, events - start))
            outbox.write_many([outbox.Event(event_type=kind, payload=PAYLOAD) for _ in new])
    backlog.analyze()


def drain(count: int, events: int, witness: Witness) -> float:
    """Return events a second, each to ``count`` listeners, from the first calls to the settle."""
    fill(count, events)
    witness.clear()
    with WorkerProcess() as worker:
        worker.wait_for(lambda: len(witness) >= count * events // STEP - 1, "end of the calls")
        end = worker.wait_until_settled()
    return (events - WARM_UP / count) / (end - witness.calls()[WARM_UP // STEP - 1])


def stored(count: int, events: int, witness: Witness) -> list[Figure]:
    """Return the bytes that an event takes once it is delivered: in the table, and in the WAL."""
    found = {}
    if connection.vendor in SIZES:
        fill(count, events)
        found["in the table and its indexes"] = asked(SIZES[connection.vendor])
    if connection.vendor == "postgresql":
        before = asked(WAL)
        drain(count, events, witness)
        found["in the write-ahead log"] = asked(WAL) - before
    name = "bytes {}, {} listeners"
    return [
        Figure(name=name.format(where, count), unit="bytes/event", values=[size / events])
        for where, size in found.items()
    ]


def asked(sql: str) -> float:
    with connection.cursor() as cursor:
        cursor.execute(sql.format(backlog.TABLE))
        return float(cursor.fetchone()[0])
