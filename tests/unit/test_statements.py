"""The text of the engine's statements: a change of it shows in the files of ``statements/``."""

from __future__ import annotations

from typing import Any

import pytest

from django_outbox.sql import DIALECTS
from django_outbox.sql.postgresql import text_array
from django_outbox.sql.sqlite import SQLite
from django_outbox.sql.values import EVENTS, STREAMS, Branch, Claim, Table
from tests import statements


@pytest.mark.parametrize("server", statements.SERVERS)
def test_a_server_gets_the_statements_that_its_file_shows(server: str) -> None:
    written = (statements.FOLDER / f"{server}.sql").read_text()
    # Without spaces: where lines are broken depends on the version of the formatter.
    assert "".join("".join(statements.sent(server)).split()) == "".join(written.split())


# What people and checks ask, writers insert, and connections need; what only calls others.
ELSEWHERE = {
    *("flow", "missing_table", "neighbours", "summaries"),
    *("estimated_rows", "failing_isolation", "queue_backlogs", "unstorable", "variables"),
    *("version_text", "weak_charset", "time_limit", "insert", "settle_all", "end_done"),
    *(
        "begin_session",
        "cluster",
        "guard_engine",
        "is_conflict",
        "is_lock_wait",
        "is_missing_table",
        "prepare_engine",
        "read_committed",
    ),
}


def test_every_statement_of_the_engine_is_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = {each for each in dir(SQLite) if each[0] != "_" and callable(getattr(SQLite, each))}
    called = set[str]()

    def noting(name: str, call: Any) -> Any:
        def note(dialect: Any, *args: Any, **given: Any) -> Any:
            called.add(name)
            return call(dialect, *args, **given)

        return note

    for name in methods:
        monkeypatch.setattr(SQLite, name, noting(name, getattr(SQLite, name)))
    assert [*statements.sent("sqlite")]
    assert methods - called == ELSEWHERE


@pytest.mark.parametrize("table", [EVENTS, STREAMS], ids=["events", "streams"])
def test_the_rows_of_a_claim_have_the_instant_that_it_writes(table: Table) -> None:
    """SQLite's clock goes on from row to row; a lease with another instant could not be settled."""
    server = statements.Server('"', statements.SERVERS["sqlite"])
    nows = [f"2026-01-02 03:04:05.00{n}000" for n in range(3)]
    found = [(*statements.row(table.columns), nows[0], None, now) for now in nows]
    server.answers = [found, found]
    claim = Claim(table=table, me="me", lease=30.0, branches=[Branch("default", 10)])
    taken = DIALECTS["sqlite"](server).claim(claim)  # type: ignore[arg-type]
    assert [row[-1] for row in taken.rows] == [nows[0]] * 3


@pytest.mark.parametrize("odd", ['a"b', "a\\b"])
def test_an_array_literal_has_no_text_that_would_end_it(odd: str) -> None:
    assert text_array(["a,b", "c d"]) == '{"a,b","c d"}'
    assert text_array(["a", odd]) == ["a", odd]
    assert text_array([]) == []
