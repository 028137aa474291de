"""Hooks around a commit that the database refuses, or whose session ends."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import IntegrityError, OperationalError, connection, connections, transaction
from django.db.utils import Error

from django_outbox import write
from tests.table import in_thread
from tests.test_hooks import Ends, empty_log, heard, stored, use

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


__all__ = ["empty_log"]  # fixtures


def test_a_commit_that_the_database_refuses_is_a_rollback(settings: Any) -> None:
    """PostgreSQL and SQLite check the constraint at the commit; MariaDB refuses the INSERT."""
    use(settings, Ends)
    with pytest.raises(IntegrityError), transaction.atomic():
        write("x")
        LogEntry.objects.create(user_id=10**6, action_flag=1, object_repr="nobody's")
    assert heard == [("rolled back", "x")]
    assert stored() == []


def kill() -> None:
    """End this test's session as a lost network or a restarted server would."""
    if connection.vendor == "sqlite":
        connection.connection.close()
        return
    ask, end = {
        "postgresql": ("SELECT pg_backend_pid()", "SELECT pg_terminate_backend(%s)"),
        "mysql": ("SELECT connection_id()", "KILL %s"),
    }[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(ask)
        session = cursor.fetchone()

    def terminate() -> None:
        with connections["default"].cursor() as cursor:
            cursor.execute(end, session)

    in_thread(terminate).result(30)


def test_a_connection_killed_before_the_commit_is_told_as_a_rollback(settings: Any) -> None:
    use(settings, Ends)
    with pytest.raises(Error), transaction.atomic():
        write("x")
        with transaction.atomic():
            write("y")
        kill()
    assert sorted(heard) == [("rolled back", "x"), ("rolled back", "y")]
    assert stored() == []  # on a new connection
    with transaction.atomic():
        write("goes on")
    assert heard[-1] == ("committed", "goes on")


def test_a_commit_without_an_answer_is_told_as_a_rollback(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``after_rollback`` means that the commit is not known to have succeeded; here it has."""
    use(settings, Ends)
    commit = connection._commit

    def lost() -> None:
        commit()
        raise OperationalError("the server went away")

    with pytest.raises(OperationalError), transaction.atomic():
        write("x")
        monkeypatch.setattr(connection, "_commit", lost)
    monkeypatch.undo()
    assert heard == [("rolled back", "x")]
    assert stored() == ["x"]
