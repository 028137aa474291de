"""Workers of release 0.1 and new ones take what the other gives back, without a rescue.

The old worker is represented by its statements; only the clock function is the database's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from django.db import DatabaseError, connection

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxStream
from django_outbox.sql import dialect_of
from tests.table import in_thread, insert, keyed, listening, row, statuses, stream
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

OUTBOX = {"POLL_INTERVAL": 0.1, "PROBE_INTERVAL": 0.05, "LOCK_WAIT": 1, "WORKERS": 2}
LEASE = 30.0


@pytest.fixture(autouse=True)
def soon(settings: Any) -> None:
    settings.OUTBOX = OUTBOX


class OldWorker:
    """A worker that sends the statements of release 0.1."""

    def __init__(self, me: str) -> None:
        self.me = me
        dialect: Any = dialect_of(connection)
        self._now, self._now_plus = dialect.now, dialect.now_plus
        quote = connection.ops.quote_name
        self._event, self._stream = quote("outbox_event"), quote("outbox_stream")
        self._key = quote("key")

    def _run(self, sql: str, *params: Any) -> int:
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            return int(cursor.rowcount)

    def _ids(self, sql: str, *params: Any) -> list[Any]:
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            return [each[0] for each in cursor.fetchall()]

    def claim(self, most: int = 100) -> list[str]:
        due = f"available_at <= {self._now} AND rescues < 2 AND (locked_by IS NULL OR "
        ids = self._ids(
            f"SELECT event_id FROM {self._event} WHERE {due} locked_by = %s) "
            "ORDER BY available_at, event_id LIMIT %s",
            self.me,
            most,
        )
        for each in ids:
            self._run(
                f"UPDATE {self._event} SET rescues = rescues + CASE WHEN locked_by IS NULL "
                f"OR locked_by = %s THEN 0 ELSE 1 END, locked_by = %s, locked_at = {self._now}, "
                f"available_at = {self._now_plus} WHERE event_id = %s AND {due} locked_by = %s)",
                self.me,
                self.me,
                LEASE,
                each,
                self.me,
            )
        mine = f"SELECT event_id FROM {self._event} WHERE locked_by = %s AND status IN (0, 2)"
        return [each for each in self._ids(mine, self.me) if each in ids]

    def settle(self, event_id: str) -> int:
        return self._run(
            f"UPDATE {self._event} SET status = 1, done_at = {self._now}, available_at = NULL, "
            "locked_by = NULL, locked_at = NULL WHERE event_id = %s AND locked_by = %s "
            "AND status IN (0, 2)",
            event_id,
            self.me,
        )

    def renew(self, event_id: str) -> int:
        return self._run(
            f"UPDATE {self._event} SET available_at = {self._now_plus} WHERE event_id = %s "
            "AND locked_by = %s AND available_at IS NOT NULL",
            LEASE,
            event_id,
            self.me,
        )

    def release(self, event_id: str) -> int:
        return self._run(
            f"UPDATE {self._event} SET available_at = {self._now}, locked_by = NULL, "
            "locked_at = NULL WHERE event_id = %s AND locked_by = %s AND status IN (0, 2)",
            event_id,
            self.me,
        )

    def claim_stream(self, key: str) -> str | None:
        """Lease a due stream; return its previous owner."""
        (was,) = self._ids(f"SELECT locked_by FROM {self._stream} WHERE {self._key} = %s", key)
        assert self._run(
            f"UPDATE {self._stream} SET due_at = {self._now_plus}, locked_by = %s, "
            f"locked_at = {self._now} WHERE {self._key} = %s AND due_at <= {self._now}",
            LEASE,
            self.me,
            key,
        )
        return was  # type: ignore[no-any-return]

    def settle_keyed(self, event_id: str) -> int:
        return self._run(
            f"UPDATE {self._event} SET status = 1, done_at = {self._now}, available_at = NULL, "
            "locked_by = NULL, locked_at = NULL WHERE event_id = %s AND status IN (0, 2) "
            f"AND EXISTS (SELECT 1 FROM {self._stream} owned WHERE owned.{self._key} = "
            f"{self._event}.{self._key} AND owned.locked_by = %s)",
            event_id,
            self.me,
        )

    def release_stream(self, key: str) -> int:
        return self._run(
            f"UPDATE {self._stream} SET due_at = {self._now}, locked_by = NULL, "
            f"locked_at = {self._now} WHERE {self._key} = %s AND locked_by = %s",
            key,
            self.me,
        )


def rescues() -> set[int]:
    return {*OutboxEvent.objects.values_list("rescues", flat=True)}


def claimed(old: OldWorker, ids: Sequence[str]) -> bool:
    return sorted(old.claim()) == sorted(ids)


def test_an_old_worker_takes_what_a_new_one_hands_back() -> None:
    entered, go_on = threading.Semaphore(0), threading.Event()

    def wait(event: outbox.Event) -> None:
        entered.release()
        assert go_on.wait(60)

    old = OldWorker("old")
    (plain,) = insert()
    head, follower = keyed("a", 2)
    with listening(wait):
        try:
            new = outbox.Worker(purge=False)
            new.start()
            assert entered.acquire(timeout=20)
            assert entered.acquire(timeout=20)
            assert old.claim() == []
            new.finish(lambda: True)
            new.hand_back(0.2)
            wait_until(lambda: claimed(old, [plain]), what="the row")
            wait_until(lambda: OutboxStream.objects.filter(pk="a").due().exists())
            assert old.claim_stream("a") is None  # no owner: its worker was not lost
            assert rescues() == {0}
        finally:
            go_on.set()
        assert (old.settle(plain), old.settle_keyed(head), old.settle_keyed(follower)) == (1, 1, 1)
    assert statuses() == {"DONE": 3}
    assert rescues() == {0}


def test_a_new_worker_takes_what_an_old_one_releases() -> None:
    old, seen = OldWorker("old"), []
    (plain,) = insert()
    (head,) = keyed("a")
    assert old.claim() == [plain]
    assert old.claim_stream("a") is None
    with listening(lambda event: seen.append(event.event_id)), outbox.Worker(purge=False):
        (late,) = insert()
        wait_until(lambda: row(late).status == Status.DONE)
        assert seen == [late]  # the old worker's leases are respected
        assert old.renew(plain) == 1
        assert (old.release(plain), old.release_stream("a")) == (1, 1)
        wait_until(lambda: statuses() == {"DONE": 3})
    assert sorted(seen[1:]) == sorted([plain, head])
    assert rescues() == {0}
    assert (old.settle(plain), old.settle_keyed(head)) == (0, 0)


def test_side_by_side_through_a_deploy_nothing_is_lost_or_rescued() -> None:
    """New workers start and stop in the middle of their listeners while an old one delivers too."""
    runs: Counter[str] = Counter()
    by_old: list[str] = []
    over = threading.Event()

    def deliver_as_old() -> None:
        old = OldWorker("old")
        while not over.wait(0.02):
            try:
                done = [each for each in old.claim(3) if old.settle(each)]
            except DatabaseError:  # a deadlock or a busy file; it tries again
                continue
            by_old.extend(done)

    def work(event: outbox.Event) -> None:
        runs[event.event_id] += 1
        over.wait(0.05)

    ids = insert(200)
    order = keyed("a", 20)
    old = in_thread(deliver_as_old)
    try:
        with listening(work):
            while statuses() != {"DONE": 220}:
                new = outbox.Worker(purge=False)
                new.start()
                before = runs.total()
                wait_until(
                    lambda before=before: (
                        runs.total() > before + 5  # type: ignore[misc]
                        or not OutboxEvent.objects.pending().exists()
                    )
                )
                new.finish(lambda: True)
                new.hand_back(0.1)
    finally:
        over.set()
        old.result(20)
    assert rescues() == {0}
    assert by_old
    assert {*runs} | {*by_old} == {*ids, *order}
    assert stream("a").locked_by is None


def test_old_workers_leave_rows_in_their_queues(settings: Any) -> None:
    """Version 0.1 takes the rows of all queues, and does not know the column."""
    settings.OUTBOX = {**OUTBOX, "QUEUES": {"hooks": {}}}
    old, seen = OldWorker("old"), []
    released, kept = insert(2, queue="hooks")
    (head,) = keyed("a", queue="hooks")
    OutboxStream.objects.update(queue="hooks")
    assert old.claim_stream("a") is None
    assert claimed(old, [released, kept])
    assert (old.release(released), old.release_stream("a")) == (1, 1)
    assert (row(released).queue, stream("a").queue) == ("hooks", "hooks")
    with (
        listening(lambda event: seen.append(event.event_id), queue="hooks"),
        outbox.Worker(purge=False),
    ):
        wait_until(lambda: sorted(seen) == sorted([released, head]))
        assert old.settle(kept) == 1
        wait_until(lambda: statuses() == {"DONE": 3})
    assert rescues() == {0}
