"""The text of every statement of the engine on every database, rendered without a database.

``python -m tests.statements`` writes ``tests/unit/statements/``; a test compares these files, so
that a review sees what a change makes of the SQL of each database. Server versions that get another
text have a file of their own. What a method sends depends on what was answered: the connection here
answers with the rows that the sample names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sqlparse

from django_outbox.listeners.history import Entry
from django_outbox.listeners.outcomes import Decision, Status
from django_outbox.listeners.queues import Route
from django_outbox.queue_settings import parked_queue
from django_outbox.sql import DIALECTS
from django_outbox.sql.values import (
    EVENTS,
    FULL,
    KEYED,
    STREAMS,
    Branch,
    Claim,
    Ending,
    LeaseKind,
    Release,
    StreamQuery,
    Unclaimed,
)

FOLDER = Path(__file__).resolve().parent / "unit" / "statements"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
TEXT = "2026-01-02 03:04:05.000000"
LATER = datetime(2099, 1, 2, tzinfo=timezone.utc)
PAUSE = 1_000_007  # the id of one, which no sequence comes to; there is none with the next id
SERVERS: dict[str, dict[str, Any]] = {
    "postgresql": {"vendor": "postgresql", "pg_version": 150000},
    "postgresql-18": {"vendor": "postgresql", "pg_version": 180000},
    "mariadb": {"vendor": "mysql", "mysql_is_mariadb": True},
    "mysql": {"vendor": "mysql", "mysql_is_mariadb": False},
    "sqlite": {"vendor": "sqlite"},
}

AT_ONCE = ("claim", "read")  # what PostgreSQL does by one statement


class Server:
    """A connection that notes each statement, and answers with the next rows of ``answers``."""

    def __init__(self, quote: str, facts: dict[str, Any]) -> None:
        self.__dict__.update(facts)
        self.alias, self.in_atomic_block, self.connection = "default", False, object()
        self.ops = SimpleNamespace(quote_name=lambda name: f"{quote}{name}{quote}")
        self.features = SimpleNamespace(
            has_select_for_update_skip_locked=True, max_query_params=None
        )
        self.sent: list[str] = []
        self.answers: list[list[tuple[Any, ...]]] = []
        self.rowcount, self.lastrowid = 0, 7
        self._rows: list[tuple[Any, ...]] = []

    @contextmanager
    def cursor(self) -> Iterator[Server]:
        yield self

    def execute(self, sql: str, params: Sequence[Any] = ()) -> None:
        assert sql.replace("%%", "").count("%s") == len(params), sql
        self.sent.append(sql)
        self._rows = self.answers.pop(0) if self.answers else []
        self.rowcount = len(self._rows)

    def fetchall(self) -> list[tuple[Any, ...]]:
        return self._rows

    def fetchmany(self, size: int) -> list[tuple[Any, ...]]:
        rows, self._rows = self._rows, []
        return rows

    def fetchone(self) -> tuple[Any, ...]:
        return self._rows[0] if self._rows else (NOW,) * 2


def row(columns: Sequence[str], **values: Any) -> tuple[Any, ...]:
    known = {"id": "a", "attempts": 0, "rescues": 0, "queue": "default", "payload": "{}", **values}
    return tuple(known.get(name) for name in columns)


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{n:03}" for n in range(count)]


def inside(call: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a call that finds a transaction open."""

    def run(dialect: Any) -> object:
        dialect.connection.in_atomic_block = True
        try:
            return call(dialect)
        finally:
            dialect.connection.in_atomic_block = False

    return run


def calls(count: int = 2) -> dict[str, Callable[[Any], object]]:
    """Return what is called with a dialect, about ``count`` rows.

    The names of the rows say in what state they are where the statements are run.
    """
    held, free, keyed = names("held", count), names("free", count), names("keyed", count)
    leases, streams = dict.fromkeys(held, NOW), dict.fromkeys(names(":held", count), NOW)
    failed = Decision(status=Status.RETRY, delay=5.0, spent=1, error="E", cause="c", history="[]")
    given = [Unclaimed(each, NOW, NOW, f"q{n % 2}") for n, each in enumerate(held)]
    first, *others = streams
    release = [Release(first, NOW, 7, None)]
    release += [Release(each, NOW, None, 5.0, "mail") for each in others]
    entry = Entry(at=NOW, kind="lost", number=1, by="w")
    route = Route("order.placed:mail", "d1", "mail", "mail")
    branches = [Branch("default", count, 3600.0, 500 * count), Branch("mail", 5)]
    light = [Branch("default", count, 3600.0), Branch("mail", 5)]
    by_stream = {"kind": LeaseKind.STREAM}
    parked = [Release(each, NOW, 7, 0.0, parked_queue(PAUSE)) for each in streams]

    def claim(**options: Any) -> Callable[[Any], object]:
        return lambda dialect: dialect.claim(Claim(me="w", lease=30.0, **options))

    def read(method: str = "read_streams", **options: Any) -> Callable[[Any], object]:
        query = StreamQuery(me="w", streams=streams, limit=32, **options)
        return lambda dialect: getattr(dialect, method)(query)

    def named(method: str, **options: Any) -> Callable[[Any], object]:
        return lambda dialect: getattr(dialect, method)(**options)

    def settle(ids: Sequence[str], **options: Any) -> Callable[[Any], object]:
        endings = [Ending(each, NOW, n % 2, failed) for n, each in enumerate(ids)]
        return named("settle", me="w", endings=endings, **options)

    return {
        "claim what is due": claim(branches=branches),
        "claim what is due at a time": claim(branches=branches[:1], at=LATER),
        "claim by id": claim(ids=held, skip_recent=0.5, exclude=["other"]),
        "claim streams": claim(table=STREAMS, branches=light),
        "claim streams, some excluded": claim(table=STREAMS, branches=light, exclude=[":x"]),
        "read streams": read(),
        "read streams, dead and due alone": read(dead_too=True, only_due_retries=True),
        "next retries": read("next_retries", dead_too=True),
        "renew": named("renew", me="w", leases=leases, lease=30.0),
        "renew streams": named("renew", me="w", leases=streams, lease=30.0, table=STREAMS),
        "release": named("release", me="w", leases=leases),
        "release when the lease ends": named("release", me="w", leases=leases, after=None),
        "release each as it was": named("unclaim", me="w", due=given),
        "release streams": named("release_streams", me="w", streams=release),
        "hand streams back": named("release", me="w", leases=streams, after=1.0, table=STREAMS),
        "settle as done": named("settle_done", me="w", ids=held),
        "settle as done, with a key": named("settle_done", me="w", ids=keyed, **by_stream),
        "delete what is done": named("delete_done", me="w", ids=held),
        "settle": settle(held),
        "settle, with a key": settle(keyed, **by_stream),
        "route rows": named(
            "route_rows",
            me="w",
            leases=dict.fromkeys(keyed, NOW),
            route=route,
            receipt="d1",
            **by_stream,
        ),
        "add rows": named("add_rows", ids=held, route=route, receipt="d1"),
        "lock an event": named("lock_event", event_id=held[0]),
        "lock rows": named("lock_rows", ids=held),
        "note a receipt": named("note_receipt", ids=held[:1], receipt="d1"),
        "note a lost worker": named("note_lost", me="w", leases=leases, entry=entry),
        "keep a stream suspected": named("keep_suspected", me="w", leases=streams, rescues=2),
        "read what is pending in slots": named(
            "pending_in_slots", slots=["?d1:a", "?d1:b"], me="w"
        ),
        "lease the newest of slots": named(
            "lease_free", me="w", ids=free, locked_at=NOW, lease=30.0, rescues=1
        ),
        "end what is coalesced": named("end_coalesced", me="w", ids=free, locked_at=NOW),
        "find suspects": named("suspects", me="w", queues=["default", "mail"], limit=count),
        "when is the next due": named("seconds_to_next_due", queues=["default"], since=1.0),
        "is anything due": named("has_due", queue="default"),
        "other queues": named("other_queues", known=["default"]),
        "move events": named("move", table=EVENTS, of="old", queue="new", limit=count),
        "move streams": named("move", table=STREAMS, of="old", queue="new", limit=count),
        "wake streams": named("wake_streams", streams=[":idle", "lane:idle"]),
        "number events": named("number", places=[(":idle", 2, "default"), (":new", 1, None)]),
        "what is due first": named("due_first", queues=["default", "mail"], limit=count),
        "park rows": inside(named("park", rows=dict.fromkeys(free, PAUSE))),
        "park streams": inside(named("release_streams", me="w", streams=parked)),
        "bring rows home": named("unpark", table=EVENTS, pause=PAUSE + 1, limit=count),
        "bring streams home": named("unpark", table=STREAMS, pause=PAUSE + 1, limit=count),
        "what is parked without its pause": named("stranded"),
        "give streams a new version": named("touch", places=[(":idle", 1, "default")]),
        "take a named lease": named("take_lease", name="purge", me="w", lease=30.0),
        "renew a named lease": named("note_lease", name="z", me="w", lease=30.0, state="s"),
        "release a named lease": named("note_lease", name="z", me="w", lease=None, state="s"),
        "what is paused": named("pauses"),
        "open a breaker": named("open_breaker", queue="mail", pause=5.0, reason="r"),
        "win the probe of a breaker": named("probe_breaker", queue="hooks", lease=5.0),
        "prolong a breaker": named("extend_breaker", queue="hooks", pause=5.0, kept=9.0),
        "close a breaker": named("close_breaker", queue="hooks"),
        "receive a message": named("receive", source="s", message_id="m"),
        "delete events": named("delete", table="outbox_event", ids=held),
        "delete streams": named("delete", table="outbox_stream", ids=[*streams]),
    }


def answers() -> dict[str, list[list[tuple[Any, ...]]]]:
    """Return what the statements of some calls answer; those of others, nothing."""
    claimed, stream = (*row(FULL), TEXT, None, TEXT), ("s", "default", 0, TEXT, None, TEXT)
    both = [claimed, (*row(FULL, id="b"), TEXT, None, TEXT)]
    heads = [[("s", 7, TEXT)], [(*row(KEYED, stream="s", seq=7), 9)]]
    return {
        "claim what is due": [both, [(1,)], [("a",)]],
        "claim what is due at a time": [both],
        "claim by id": [[claimed]],
        "claim streams": [[stream, ("t", *stream[1:])], [(1,)], [("s",)]],
        "read streams": heads,
        "read streams, dead and due alone": heads,
        "renew": [[], [(NOW,)]],
        "renew streams": [[], [(NOW,)]],
        "release streams": [[("s", None)]],
        "other queues": [[("mail",)]],
        "move events": [[("a",)]],
        "move streams": [[("s",)]],
        "park rows": [[(PAUSE,)]],
        "park streams": [[(PAUSE,)], [("s", None)]],
        "bring rows home": [[("a",)], [("a", None, "paused:8")]],
        "bring streams home": [[("s",)], [("s", 1, "a")], [("a", None, "mail")]],
    }


def sent(server: str) -> Iterator[str]:
    """Yield the statements that a server gets, each behind the comment that says what it is for."""
    facts = SERVERS[server]
    quote = "`" if facts["vendor"] == "mysql" else '"'
    answered = answers()
    for name, call in calls().items():
        connection = Server(quote, facts)
        if facts["vendor"] != "postgresql" or not name.startswith(AT_ONCE):
            connection.answers = [*answered.get(name, [])]
        call(DIALECTS[facts["vendor"]](connection))  # type: ignore[arg-type]
        yield f"-- {name}"
        yield from (f"{sql};" for sql in connection.sent)


def formatted(sql: str) -> str:
    return str(sqlparse.format(" ".join(sql.split()), reindent=True, wrap_after=100)).strip()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for server in SERVERS:
        parts = [formatted(each) for each in sent(server)]
        (FOLDER / f"{server}.sql").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    import django

    django.setup()
    main()
