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
LEASES = {"a": NOW, "b": NOW}
BRANCHES = [Branch("default", 10, 60.0, 1000), Branch("mail", 5)]
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

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        yield from self._rows

    def fetchone(self) -> tuple[Any, ...]:
        return self._rows[0] if self._rows else (NOW,) * 2


def row(columns: Sequence[str], **values: Any) -> tuple[Any, ...]:
    known = {"id": "a", "attempts": 0, "rescues": 0, "queue": "default", "payload": "{}", **values}
    return tuple(known.get(name) for name in columns)


def calls() -> dict[str, tuple[Callable[[Any], object], list[list[tuple[Any, ...]]]]]:
    """Return what is called with a dialect and a connection, and what its statements answer."""
    claimed_row = (*row(FULL), TEXT, None, TEXT)
    stream_row = ("s", "default", 0, TEXT, None, TEXT)
    failed = Decision(status=Status.RETRY, delay=5.0, spent=1, error="E", cause="c", history="[]")
    endings = [Ending("a", NOW, 0, failed), Ending("b", NOW, 1, failed)]
    given = [Unclaimed("a", NOW, NOW, "default"), Unclaimed("b", NOW, NOW, "mail")]
    release = [Release("s", NOW, 7, None), Release("t", NOW, None, 5.0, "mail")]
    entry = Entry(at=NOW, kind="lost", number=1, by="w")
    route = Route("order.placed:mail", "d1", "mail", "mail")
    both: list[list[tuple[Any, ...]]] = [[claimed_row, (*row(FULL, id="b"), TEXT, None, TEXT)]]

    def claim(**options: Any) -> Callable[[Any], object]:
        return lambda dialect: dialect.claim(Claim(me="w", lease=30.0, **options))

    def streams(**options: Any) -> Callable[[Any], object]:
        return lambda dialect: dialect.claim(
            Claim(
                table=STREAMS,
                me="w",
                lease=30.0,
                branches=[Branch("default", 10, 60.0), Branch("mail", 5)],
                **options,
            )
        )

    def read(**options: Any) -> Callable[[Any], object]:
        query = StreamQuery(me="w", streams={"s": NOW, "t": NOW}, limit=32, **options)
        return lambda dialect: dialect.read_streams(query)

    def named(method: str, **options: Any) -> Callable[[Any], object]:
        return lambda dialect: getattr(dialect, method)(**options)

    keyed = {"kind": LeaseKind.STREAM}
    heads: list[list[tuple[Any, ...]]] = [[("s", 7, TEXT)], [(*row(KEYED, stream="s", seq=7), 9)]]
    return {
        "claim what is due": (claim(branches=BRANCHES), [*both, [(1,)], [("a",)]]),
        "claim what is due at a time": (claim(branches=BRANCHES[:1], at=NOW), both),
        "claim by id": (
            claim(ids=["a", "b"], skip_recent=0.5, exclude=["c"]),
            [[(*row(FULL), TEXT, None, TEXT)]],
        ),
        "claim streams": (streams(), [[stream_row, ("t", *stream_row[1:])], [(1,)], [("s",)]]),
        "claim streams, some excluded": (streams(exclude=["x"]), []),
        "read streams": (read(), heads),
        "read streams, dead and due alone": (read(dead_too=True, only_due_retries=True), heads),
        "next retries": (
            lambda dialect: dialect.next_retries(
                StreamQuery(me="w", streams=LEASES, limit=32, dead_too=True)
            ),
            [],
        ),
        "renew": (named("renew", me="w", leases=LEASES, lease=30.0), [[], [(NOW,)]]),
        "renew streams": (
            named("renew", me="w", leases=LEASES, lease=30.0, table=STREAMS),
            [[], [(NOW,)]],
        ),
        "release": (named("release", me="w", leases=LEASES), []),
        "release when the lease ends": (named("release", me="w", leases=LEASES, after=None), []),
        "release each as it was": (named("unclaim", me="w", due=given), []),
        "release streams": (named("release_streams", me="w", streams=release), [[("s", None)]]),
        "hand streams back": (
            named("release", me="w", leases=LEASES, after=1.0, table=STREAMS),
            [],
        ),
        "settle as done": (named("settle_done", me="w", ids=["a", "b"]), []),
        "settle as done, with a key": (named("settle_done", me="w", ids=["a", "b"], **keyed), []),
        "delete what is done": (named("delete_done", me="w", ids=["a", "b"]), []),
        "settle": (named("settle", me="w", endings=endings), []),
        "settle, with a key": (named("settle", me="w", endings=endings, **keyed), []),
        "route rows": (
            named("route_rows", me="w", leases=LEASES, route=route, receipt="d1", **keyed),
            [],
        ),
        "add rows": (named("add_rows", ids=["a", "b"], route=route, receipt="d1"), []),
        "lock an event": (named("lock_event", event_id="a"), []),
        "lock rows": (named("lock_rows", ids=["a", "b"]), []),
        "note a receipt": (named("note_receipt", ids=["a"], receipt="d1"), []),
        "note a lost worker": (named("note_lost", me="w", leases=LEASES, entry=entry), []),
        "keep a stream suspected": (named("keep_suspected", me="w", leases=LEASES, rescues=2), []),
        "read what is pending in slots": (
            named("pending_in_slots", slots=["?d1:a", "?d1:b"], me="w"),
            [],
        ),
        "lease the newest of slots": (
            named("lease_free", me="w", ids=["a", "b"], locked_at=NOW, lease=30.0, rescues=1),
            [],
        ),
        "end what is coalesced": (
            named("end_coalesced", me="w", ids=["a", "b"], locked_at=NOW),
            [],
        ),
        "find suspects": (named("suspects", me="w", queues=["default", "mail"], limit=100), []),
        "when is the next due": (named("seconds_to_next_due", queues=["default"], since=1.0), []),
        "is anything due": (named("has_due", queue="default"), []),
        "other queues": (named("other_queues", known=["default"]), [[("mail",)], []]),
        "move events": (named("move", table=EVENTS, of="a", queue="b", limit=9), [[("a",)]]),
        "move streams": (named("move", table=STREAMS, of="a", queue="b", limit=9), [[("s",)]]),
        "wake streams": (named("wake_streams", streams=[":a", "l:b"]), []),
        "number events": (named("number", places=[(":a", 2, "default"), (":b", 1, None)]), []),
        "resume": (named("resume", ids=["a", "b"]), []),
        "take a named lease": (named("take_lease", name="purge", me="w", lease=30.0), []),
        "delete events": (named("delete", table="outbox_event", ids=["a", "b"]), []),
        "delete streams": (named("delete", table="outbox_stream", ids=["s", "t"]), []),
    }


def sent(server: str) -> Iterator[str]:
    """Yield the statements that a server gets, each behind the comment that says what it is for."""
    facts = SERVERS[server]
    quote = "`" if facts["vendor"] == "mysql" else '"'
    for name, (call, answers) in calls().items():
        connection = Server(quote, facts)
        if facts["vendor"] != "postgresql" or not name.startswith(AT_ONCE):
            connection.answers = [[*each] for each in answers]
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
