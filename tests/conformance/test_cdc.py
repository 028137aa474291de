"""Change data capture: what PostgreSQL's logical decoding reports about the event table.

Debezium reads with the plugin ``pgoutput``, so these tests read that plugin's messages.
"""

from __future__ import annotations

import copy
import json
import re
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections, transaction

import django_outbox as outbox
from django_outbox.conf import problems
from django_outbox.listeners import registry
from django_outbox.models import OutboxEvent
from tests import databases, debian, samples, servers
from tests.servers import Postgres

ALIAS = "captured"
PAGE = "how-to/relay-to-kafka.md#Stream with Debezium"
WRITER = {"MODE": "writer_only"}

decoding = pytest.mark.skipif(
    databases.vendor() != "postgres", reason="logical decoding is PostgreSQL's"
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of one row, as in the log; for a delete, only the primary key."""

    kind: str  # insert, update, delete
    columns: dict[str, str | None]


class Messages:
    """A parser for pgoutput's messages, protocol version 1."""

    KINDS = {b"I": "insert", b"U": "update", b"D": "delete"}

    def __init__(self) -> None:
        self._columns: dict[int, list[str]] = {}  # of relations, by oid

    def read(self, message: bytes) -> Change | None:
        kind, rest = message[:1], message[1:]
        if kind == b"R":
            self._relation(rest)
            return None
        if kind not in self.KINDS:  # begin, commit and the like
            return None
        (oid,) = struct.unpack_from("!I", rest)
        return Change(kind=self.KINDS[kind], columns=self._row(oid, rest[4:]))

    def _relation(self, data: bytes) -> None:
        (oid,) = struct.unpack_from("!I", data)
        _, _, data = data[4:].split(b"\0", 2)
        (count,) = struct.unpack_from("!H", data, 1)
        place, names = 3, []
        for _ in range(count):
            end = data.index(b"\0", place + 1)
            names.append(data[place + 1 : end].decode())
            place = end + 1 + 8
        self._columns[oid] = names

    def _row(self, oid: int, data: bytes) -> dict[str, str | None]:
        """Parse the last tuple of a message: the new row, or the key of a deleted row."""
        (count,) = struct.unpack_from("!H", data, 1)
        place, values = 3, []
        for _ in range(count):
            kind, place = data[place : place + 1], place + 1
            if kind in b"nu":
                values.append(None)
                continue
            (length,) = struct.unpack_from("!I", data, place)
            values.append(data[place + 4 : place + 4 + length].decode())
            place += 4 + length
        return dict(zip(self._columns[oid], values, strict=True))


class Log:
    """A replication slot for the event table."""

    def __init__(self) -> None:
        self._messages = Messages()
        self._run("CREATE PUBLICATION shop FOR TABLE outbox_event")
        self._run("SELECT pg_create_logical_replication_slot('shop', 'pgoutput')")

    def close(self) -> None:
        self._run("SELECT pg_drop_replication_slot('shop')")
        self._run("DROP PUBLICATION shop")

    def _run(self, sql: str) -> list[Any]:
        with connections[ALIAS].cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchall() if cursor.description else []

    def changes(self) -> list[Change]:
        """Return the changes that were committed since the last call."""
        rows = self._run(
            "SELECT data FROM pg_logical_slot_get_binary_changes("
            "'shop', NULL, NULL, 'proto_version', '1', 'publication_names', 'shop')"
        )
        return [found for (data,) in rows if (found := self._messages.read(bytes(data)))]


@pytest.fixture(scope="module")
def server(django_db_blocker: Any) -> Iterator[None]:
    """Start a server for this module, with logical decoding and the outbox's tables."""
    try:
        servers.prepare("postgres")
    except debian.Unavailable as error:
        pytest.skip(f"a server of the test's own is needed: {error}")
    with tempfile.TemporaryDirectory(prefix="outbox-", ignore_cleanup_errors=True) as directory:
        server = Postgres(Path(directory), wal_level="logical")
        server.start()
        settings = copy.deepcopy(connections.settings["default"])
        settings.update(databases._settings(server.url))
        connections.settings[ALIAS] = settings
        try:
            with django_db_blocker.unblock():
                call_command("migrate", "django_outbox", database=ALIAS, verbosity=0)
                yield
        finally:
            connections[ALIAS].close()
            del connections[ALIAS], connections.settings[ALIAS]
            server.stop("immediate")


@pytest.fixture
def log(server: None) -> Iterator[Log]:
    """Return a log that begins now, with an empty table."""
    events().all().delete()
    log = Log()
    yield log
    log.close()


def write(event_type: str = "order.placed", payload: Any = None, **fields: Any) -> str | None:
    with transaction.atomic(using=ALIAS):
        return outbox.write(event_type, payload, using=ALIAS, **fields)


def events() -> Any:
    return OutboxEvent.objects.using(ALIAS)


def connector() -> dict[str, str]:
    page = samples.section(PAGE)
    [text] = re.findall(r'```json title="connector.json"\n(.*?)```', page, re.DOTALL)
    return dict(json.loads(text)["config"])


def routed(row: dict[str, str | None], config: dict[str, str]) -> dict[str, Any]:
    """Apply the event router's column options to a row."""
    options = {name.removeprefix("transforms.outbox."): value for name, value in config.items()}
    placement = options["table.fields.additional.placement"]
    headers = {}
    for each in placement.split(","):
        column, place, name = each.split(":")
        assert place == "header"
        headers[name] = row[column]
    return {
        "id": row[options["table.field.event.id"]],
        "key": row[options["table.field.event.key"]],
        "value": row[options["table.field.event.payload"]],
        "topic": options["route.topic.replacement"].replace(
            "${routedByValue}", row[options["route.by.field"]] or ""
        ),
        "headers": headers,
    }


@decoding
def test_10_the_router_finds_everything_by_column_options(log: Log, settings: Any) -> None:
    settings.OUTBOX = WRITER
    event_id = write(
        payload={"sku": "büch/7", "n": 1.10},
        aggregate_type="shop.Order",
        aggregate_id="7",
        tenant_id="acme",
        headers={"traceparent": "00-x"},
    )
    [change] = log.changes()
    assert change.kind == "insert"
    assert routed(change.columns, connector()) == {
        "id": event_id,
        "key": "7",
        "value": events().get(pk=event_id).payload,
        "topic": "shop.shop.Order",
        "headers": {
            "eventType": "order.placed",
            "headers": '{"traceparent":"00-x"}',
            "tenantId": "acme",
        },
    }
    assert change.columns["payload"] == '{"sku":"büch/7","n":1.1}'
    assert set(change.columns) == {field.column for field in OutboxEvent._meta.local_fields}


@decoding
def test_w24_in_writer_only_there_is_no_update(log: Log, settings: Any) -> None:
    """Writes of any kind, and a running worker, cause inserts only; no event is missing."""
    settings.OUTBOX = {**WRITER, "RETENTION_DONE": 3600, "PURGE_INTERVAL": 0.05}
    written = [
        write(),
        write(unique_key="once"),
        write(key="order-7"),
        write(key="order-7"),
        write(deliver_after=60),
    ]
    write(unique_key="once", on_duplicate="ignore")
    with transaction.atomic(using=ALIAS):
        written += outbox.write_many(
            [outbox.Event(event_type="a"), outbox.Event(event_type="b")], using=ALIAS
        )
    with pytest.raises(ZeroDivisionError), transaction.atomic(using=ALIAS):
        outbox.write("order.undone", using=ALIAS)
        raise ZeroDivisionError
    with outbox.Worker(using=ALIAS):
        pass
    changes = log.changes()
    assert [each.kind for each in changes] == ["insert"] * len(written)
    assert [each.columns["event_id"] for each in changes] == written


@decoding
def test_w24_the_purge_deletes_and_nothing_else(log: Log, settings: Any) -> None:
    settings.OUTBOX = {**WRITER, "RETENTION_DONE": 0}
    event_id = write()
    assert events().purge() == 1
    assert [(each.kind, each.columns["id"]) for each in log.changes()] == [
        ("insert", event_id),
        ("delete", event_id),
    ]
    assert not events().exists()


@decoding
def test_w24_deleted_at_once_the_table_is_empty_and_the_log_is_not(log: Log, settings: Any) -> None:
    """The how-to's own hook deletes the row in the writer's transaction."""
    with samples.modules(PAGE) as made:
        hook = made["shop.hooks"].DeleteAtOnce
        settings.OUTBOX = made["settings_without_rows"].OUTBOX
        original = OutboxEvent.objects
        made["shop.hooks"].OutboxEvent = type("Here", (), {"objects": original.using(ALIAS)})
        assert hook.__name__ == "DeleteAtOnce"
        event_id = write(payload={"sku": "7"})
        assert not events().exists()
    insert, delete = log.changes()
    assert (insert.kind, insert.columns["event_id"]) == ("insert", event_id)
    assert insert.columns["payload"] == '{"sku":"7"}'
    assert (delete.kind, delete.columns["id"]) == ("delete", event_id)


@decoding
def test_beside_workers_the_log_tells_updates_which_the_router_skips(
    log: Log, settings: Any
) -> None:
    """In the other modes workers update rows, as the how-to says."""
    event_id = write()

    def nothing(event: outbox.Event) -> None:
        """Do nothing."""

    outbox.listener("order.placed")(nothing)
    try:
        assert outbox.drain(using=ALIAS) == 1
    finally:
        registry.remove(nothing)
    changes = log.changes()
    assert {each.columns["event_id"] for each in changes} == {event_id}
    assert [each.kind for each in changes].count("insert") == 1
    assert {each.kind for each in changes[1:]} == {"update"}


def test_the_samples_are_fit(settings: Any) -> None:
    with samples.modules(PAGE) as made:
        for name in ("settings_debezium", "settings_without_rows"):
            settings.OUTBOX = made[name].OUTBOX
            assert problems() == []
