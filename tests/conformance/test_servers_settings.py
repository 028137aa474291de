"""Settings of servers and connections that a worker must bear, or that a check must report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.core.checks import run_checks
from django.db import connection, connections, transaction

import django_outbox as outbox
from django_outbox.models import OutboxEvent, OutboxInbox
from tests import databases
from tests.surroundings import by_whom, deliver
from tests.table import histories, listening, row, statuses, write
from tests.test_debug import TWICE, failing_with, outside

MYSQL = databases.vendor() in ("mysql", "mariadb")

on_mysql = pytest.mark.skipif(not MYSQL, reason="others have no charset of a connection")


@pytest.fixture(autouse=True)
def quick(settings: Any) -> None:
    settings.OUTBOX = {"WORKERS": 2, "PROBE_INTERVAL": 0.05, "POLL_INTERVAL": 0.2}


@contextmanager
def options(**given: Any) -> Iterator[None]:
    """Reconnect with other OPTIONS, also in other threads, during a block."""
    mine = connections.settings["default"]["OPTIONS"]
    before = {**mine}
    connection.close()
    mine.update(given)
    try:
        yield
    finally:
        connection.close()
        mine.clear()
        mine.update(before)


# -- charsets of MySQL and MariaDB -----------------------------------------------------------------

LACKING = {
    "utf8, emoji": ("utf8", "boom 😀"),
    "utf8mb3, Chinese beyond the basic plane": ("utf8mb3", "𠮷野家"),
    "latin1, emoji": ("latin1", "boom 😀"),
    "latin1, Polish": ("latin1", "zażółć"),
    "cp1251, German": ("cp1251", "grün"),
    "ascii, German": ("ascii", "grün"),
}
lacking = pytest.mark.parametrize(("charset", "text"), LACKING.values(), ids=LACKING)


@on_mysql
@outside
@by_whom
@lacking
def test_an_error_that_the_charset_lacks_is_stored_whole(
    charset: str, text: str, by_drain: bool
) -> None:
    with options(charset=charset), listening(failing_with(text), retry=TWICE):
        ids = write(7)
        deliver(until={"DEAD": 7}, by_drain=by_drain)
    assert [row(each).attempts for each in ids] == [2] * 7
    assert [text in (row(each).last_error or "") for each in ids] == [True, False, False] * 2 + [
        True
    ]
    assert len(histories()) == 14


@on_mysql
@outside
def test_a_session_that_is_not_strict_changes_no_text() -> None:
    given = {"charset": "utf8mb3", "init_command": "SET SESSION sql_mode = ''"}
    with options(**given), listening(failing_with("boom 😀"), retry=TWICE):
        [event_id] = write(1)
        deliver(until={"DEAD": 1}, by_drain=False)
    assert "boom 😀" in (row(event_id).last_error or "")


STRICT = {"strict": {}, "not strict": {"init_command": "SET SESSION sql_mode = ''"}}


@on_mysql
@outside
@pytest.mark.parametrize("mode", STRICT.values(), ids=STRICT)
@lacking
def test_what_the_charset_would_change_is_not_written(
    charset: str, text: str, mode: dict[str, str], django_assert_num_queries: Any
) -> None:
    """Before any SQL; the transaction stays usable."""
    names = ("key", "unique_key", "tenant_id", "aggregate_id", "aggregate_type")
    fields: list[dict[str, Any]] = [{name: text} for name in names]
    fields += [{"payload": {"name": text}}, {"headers": {"name": text}}]
    with options(charset=charset, **mode), transaction.atomic():
        for each in fields:
            with django_assert_num_queries(0), pytest.raises(outbox.InvalidEvent):
                outbox.write("order.placed", **each)
        with pytest.raises(outbox.InvalidEvent):
            outbox.write_many(
                [outbox.Event(event_type="a"), outbox.Event(event_type="b", payload=text)]
            )
        with pytest.raises(outbox.InvalidEvent), outbox.inbox.once("x", text):
            pass
        outbox.write("order.placed", {"name": "plain"})
    assert statuses() == {"NEW": 1}
    assert not OutboxInbox.objects.exists()


FITTING = [
    ("utf8mb4", "😀 𠮷"),
    ("utf8mb3", "zażółć 野家"),
    ("latin1", "grün €"),
    ("cp1251", "привет"),
]


@on_mysql
@outside
@pytest.mark.parametrize(("charset", "text"), FITTING, ids=[each for each, _ in FITTING])
def test_what_the_charset_has_is_written_unchanged(charset: str, text: str) -> None:
    with options(charset=charset):
        [event_id] = write(1, payload={"name": text}, tenant_id=text)
    assert row(event_id).tenant_id == text
    assert text in row(event_id).payload


def ids_of_checks() -> set[str]:
    found = run_checks(databases=["default"])
    return {str(each.id).rpartition(".")[2] for each in found}


@outside
def test_the_settings_of_the_tests_are_fine() -> None:
    assert ids_of_checks() & {"E056", "E057"} == set()


@on_mysql
@outside
@pytest.mark.parametrize("charset", ["utf8", "utf8mb3", "latin1", "cp1251", "ascii"])
def test_a_charset_that_lacks_characters_is_an_error(charset: str) -> None:
    with options(charset=charset):
        assert "E057" in ids_of_checks()


# -- servers of their own --------------------------------------------------------------------------


def set_global(alias: str, name: str, value: str) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SET GLOBAL {name} = {value}")
    connections[alias].close()


@on_mysql
@by_whom
def test_errors_larger_than_a_packet_are_stored(alias: str, by_drain: bool) -> None:
    def fail(event: outbox.Event) -> None:
        raise ValueError("x" * 4000)

    set_global(alias, "max_allowed_packet", str(64 * 1024))
    with listening(fail, retry=outbox.Fixed(3600, max_attempts=2)):
        with transaction.atomic(using=alias):
            events = [outbox.Event(event_type="order.placed", payload={"n": n}) for n in range(200)]
            outbox.write_many(events, using=alias)
        deliver(until={"RETRY": 200}, by_drain=by_drain, using=alias)
    rows = OutboxEvent.objects.using(alias)
    assert {*rows.values_list("attempts", flat=True)} == {1}
    assert rows.exclude(history=None).count() == 200


@pytest.mark.skipif(databases.vendor() != "mysql", reason="MySQL logs for replicas by default")
@pytest.mark.parametrize(("value", "told"), [("STATEMENT", True), ("MIXED", False), ("ROW", False)])
def test_a_log_of_statements_is_an_error(alias: str, value: str, told: bool, settings: Any) -> None:
    set_global(alias, "binlog_format", value)
    found = {each.id for each in run_checks(databases=[alias])}
    assert ("django_outbox.E056" in found) == told
    settings.OUTBOX = {"MODE": "writer_only"}
    assert "django_outbox.E056" not in {each.id for each in run_checks(databases=[alias])}


# -- settings of a role or a session ---------------------------------------------------------------

ODD = {
    "postgres": r"array_nulls=off; standard_conforming_strings=off; DateStyle=German; "
    r"IntervalStyle=sql_standard; TimeZone=Asia/Kathmandu; bytea_output=escape; "
    r"transform_null_equals=on; quote_all_identifiers=on; extra_float_digits=-15; "
    r"default_transaction_isolation=repeatable\ read; enable_indexscan=off",
    "mysql": "sql_mode = 'ANSI'; sql_mode = 'NO_BACKSLASH_ESCAPES,PAD_CHAR_TO_FULL_LENGTH'; "
    "sql_mode = 'TRADITIONAL,ONLY_FULL_GROUP_BY,NO_ZERO_DATE'; sql_select_limit = 1000; "
    "time_zone = '+05:45'; group_concat_max_len = 4; sql_auto_is_null = 1; "
    "sql_safe_updates = 1",
}


@pytest.mark.skipif(databases.vendor() == "sqlite", reason="SQLite has no server")
@outside
@by_whom
@pytest.mark.parametrize("odd", ODD["mysql" if MYSQL else "postgres"].split("; "))
def test_no_statement_depends_on_a_setting(
    odd: str, by_drain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"init_command": f"SET SESSION {odd}"} if MYSQL else {"options": f"-c {odd}"}
    with (
        options(**given),
        listening(failing_with("boom"), retry=TWICE),
        listening(lambda event: None, "order.done"),
        listening(lambda event: outbox.Dead("over"), "order.over"),
    ):
        for key in (None, "k"):
            write(3, key=key)
            write(3, "order.done", key=key)
            write(3, "order.over", key=key)
        deliver(until={"DEAD": 12, "DONE": 6}, by_drain=by_drain)
        assert OutboxEvent.objects.filter(event_type="order.over").discard() == 6
        assert OutboxEvent.objects.dead().replay() == 6
        deliver(until={"DEAD": 6, "DONE": 6}, by_drain=by_drain)
    assert "failed error" not in caplog.text
    assert None not in [each.milliseconds for each in histories() if each.kind == "dead"]
