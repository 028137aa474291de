"""Compare streams with a small model, through random histories of writes, failures and losses.

``OUTBOX_EXAMPLES=2000`` runs 2,000 histories of each variant instead of 8.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import override_settings
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import django_outbox as outbox
from django_outbox.listeners.outcomes import DONE, Status
from django_outbox.models import OutboxEvent, OutboxStream
from django_outbox.sql import dialect_of
from django_outbox.sql.values import KEYED, LeaseKind, StreamQuery
from tests.table import (
    PLACED,
    end_stream_leases,
    endings,
    in_thread,
    listening,
    now,
    releases,
    stream_claim,
    stream_leases,
)

pytestmark = pytest.mark.django_db(transaction=True)

EXAMPLES = int(os.environ.get("OUTBOX_EXAMPLES", "8"))
FAR = 600.0  # seconds until a failed or deferred event is due; only ``time_moves_on`` ends the wait
KEYS = ("a", "b", "c")
ANSWERS: dict[str, Callable[[], Any]] = {
    "fail": lambda: ValueError("told to"),
    "defer": lambda: outbox.Defer(FAR),
    "die": lambda: outbox.Dead("told to"),
}
AFTER = {"fail": "failed", "defer": "deferred", "die": "dead"}
STATUS = {"done": {Status.DONE}, "dead": {Status.DEAD}}
UNFINISHED = ("new", "failed", "deferred")
PENDING = {Status.NEW, Status.RETRY}

keys = st.sampled_from(KEYS)
plans = st.lists(st.sampled_from(list(ANSWERS)), max_size=3)


@dataclass
class Written:
    """What the model knows about a committed event."""

    key: str
    seq: int
    plan: list[str]
    state: str = "new"


@dataclass
class Late:
    """A transaction that is open in another session."""

    key: str
    plan: list[str]
    end: threading.Event
    future: Future[tuple[str, bool]]
    rolls_back: list[bool]


@dataclass
class Claimed:
    """What a second owner has claimed of one stream."""

    key: str
    seq: int
    ids: list[str]
    is_idle: bool  # the stream had no other unfinished events when it was read


def put(events: Sequence[tuple[str, list[str]]]) -> list[str]:
    return outbox.write_many(
        [outbox.Event(event_type=PLACED, payload={}, key=key) for key, _ in events]
    )


class Streams(RuleBasedStateMachine):
    def __init__(self, stop: bool, on_dead: str) -> None:
        super().__init__()
        OutboxEvent.objects.all().delete()
        OutboxStream.objects.all().delete()
        self.stop, self.blocks = stop, on_dead == "block"
        self.events: dict[str, Written] = {}
        self.last: dict[str, int] = {}  # the highest seq ever given, by key
        self.wrong: list[str] = []
        self.late: Late | None = None
        self.rival: Claimed | None = None
        self.settings = override_settings(
            OUTBOX={
                "STOP_ON_FIRST_FAILURE": stop,
                "ON_DEAD": on_dead,
                "MAX_RESCUES": 100,
                "RETENTION_DONE": 0.001,  # not 0, which deletes at the settle
                "RETRY": {"policy": "fixed", "delay": FAR, "max_attempts": 99},
            }
        )
        self.settings.enable()
        self.listening = listening(self.listener)  # so that writers know it
        self.listening.__enter__()

    # -- the model -------------------------------------------------------------------------------

    def committed(self, ids: Sequence[str], plans: Sequence[list[str]]) -> None:
        for event_id, plan in zip(ids, plans, strict=True):
            row = OutboxEvent.objects.get(pk=event_id)
            assert row.key is not None and row.seq is not None
            assert row.seq > self.last.get(row.key, 0), f"{row.key} went back"
            self.last[row.key] = row.seq
            self.events[event_id] = Written(row.key, row.seq, [*plan])

    def starts(self, event_id: str, done: Sequence[str] = ()) -> None:
        """Check that this is the next event of its key."""
        event = self.events.get(event_id)
        if event is None or event.state != "new":
            self.wrong.append(f"delivered {event_id}, which is {event}")
            return
        passed = {"done", "gone"}
        passed |= set() if self.blocks else {"dead"}
        passed |= set() if self.stop else {"failed"}
        for other_id, other in self.events.items():
            before = other.key == event.key and other.seq < event.seq and other_id not in done
            if before and other.state not in passed:
                self.wrong.append(f"{event} overtook {other}")

    def listener(self, event: outbox.Event) -> Any:
        self.starts(event.event_id)
        written = self.events.get(event.event_id)
        answer = written.plan.pop(0) if written and written.plan else None
        if written:
            written.state = "done" if answer is None else AFTER[answer]
        given = None if answer is None else ANSWERS[answer]()
        if isinstance(given, Exception):
            raise given
        return given

    def of_key(self, key: str, *states: str) -> list[str]:
        return [pk for pk, each in self.events.items() if each.key == key and each.state in states]

    def is_free(self, key: str) -> bool:
        """Return whether a writer of this key need not wait for the open transaction."""
        return self.late is None or self.late.key != key

    # -- writers ---------------------------------------------------------------------------------

    @rule(events=st.lists(st.tuples(keys, plans), min_size=1, max_size=4))
    def write(self, events: list[tuple[str, list[str]]]) -> None:
        events = [each for each in events if self.is_free(each[0])]
        with transaction.atomic():
            ids = put(events)
        self.committed(ids, [plan for _, plan in events])

    @precondition(lambda self: self.late is None and connection.vendor != "sqlite")
    @rule(key=keys, plan=plans)
    def write_in_another_session(self, key: str, plan: list[str]) -> None:
        begun, end = threading.Event(), threading.Event()
        rolls_back: list[bool] = []

        def transact() -> tuple[str, bool]:
            try:
                with transaction.atomic():
                    (event_id,) = put([(key, plan)])
                    begun.set()
                    end.wait(60)
                    transaction.set_rollback(rolls_back[0])
                return event_id, rolls_back[0]
            finally:
                begun.set()

        self.late = Late(key, plan, end, in_thread(transact), rolls_back)
        begun.wait(30)

    @precondition(lambda self: self.late is not None)
    @rule(rolls_back=st.booleans())
    def end_the_other_session(self, rolls_back: bool) -> None:
        late, self.late = self.late, None
        assert late is not None
        late.rolls_back.append(rolls_back)
        late.end.set()
        event_id, undone = late.future.result(30)
        if not undone:
            self.committed([event_id], [late.plan])

    # -- workers ---------------------------------------------------------------------------------

    @rule(limit=st.none() | st.integers(1, 3))
    def drain(self, limit: int | None) -> None:
        outbox.drain(limit=limit)

    @precondition(lambda self: self.rival is None)
    @rule()
    def a_rival_claims(self) -> None:
        dialect = dialect_of(connection)
        claim = stream_claim("rival", lease=FAR, limit=1)
        for name, *_ in dialect.claim(claim).rows:
            key = name.removeprefix(":")
            wanted = StreamQuery(
                me="rival",
                streams=stream_leases([name]),
                limit=9,
                dead_too=self.blocks,
                only_due_retries=not self.stop,
            )
            (found,) = dialect.read_streams(wanted)
            rows = [dict(zip(KEYED, each, strict=False)) for each in found.rows]
            taken: list[str] = []
            for row in rows:
                if row["status"] == Status.DEAD or self.events[row["event_id"]].state != "new":
                    break
                self.starts(row["event_id"], taken)
                taken.append(row["event_id"])
            left = set(self.of_key(key, *UNFINISHED)) - set(taken)
            self.rival = Claimed(key, found.seq, taken, not left)

    @precondition(lambda self: self.rival is not None)
    @rule(between=st.none() | plans)
    def the_rival_settles_and_releases(self, between: list[str] | None) -> None:
        """An event may be written between its read and its release."""
        rival, self.rival = self.rival, None
        assert rival is not None
        if between is not None:
            self.write([(rival.key, between)])
        dialect = dialect_of(connection)
        stream = OutboxStream.objects.filter(stream__of_key=rival.key).first()
        owns = stream is not None and stream.locked_by == "rival"
        for each in rival.ids:
            pairs = [(each, DONE)]
            settled = dialect.settle_all(me="rival", endings=endings(pairs), kind=LeaseKind.STREAM)
            assert settled == owns
            if owns:
                self.events[each].state = "done"
        delay = None if rival.is_idle else 0.0
        given = releases((f":{rival.key}", rival.seq, delay))
        if not dialect.release_streams(me="rival", streams=given) and owns:
            end_stream_leases(rival.key) if self.is_free(rival.key) else None

    @precondition(lambda self: self.rival is not None and self.is_free(self.rival.key))
    @rule()
    def the_lease_of_the_rival_ends(self) -> None:
        assert self.rival is not None
        if OutboxStream.objects.filter(stream__of_key=self.rival.key, locked_by="rival").exists():
            end_stream_leases(self.rival.key)

    # -- time and operators ----------------------------------------------------------------------

    @rule()
    def time_moves_on(self) -> None:
        past = now() - timedelta(seconds=1)
        for pk, each in self.events.items():
            if each.state in ("failed", "deferred") and self.is_free(each.key):
                OutboxEvent.objects.filter(pk=pk).update(deliver_at=past)
                each.state = "new"
        for key in filter(self.is_free, KEYS):
            OutboxStream.objects.filter(key=key, locked_by=None, due_at__gt=past).update(
                due_at=past
            )
            if self.rival is None:  # it could not release what a writer had locked
                OutboxStream.objects.filter(key=key, locked_by="rival").update(due_at=past)

    @rule(key=keys, verb=st.sampled_from(["replay", "discard"]), first=st.booleans())
    def end_of_the_dead(self, key: str, verb: str, first: bool) -> None:
        dead = self.of_key(key, "dead")[: 1 if first else None]
        if dead and self.is_free(key):
            assert getattr(OutboxEvent.objects.filter(pk__in=dead), verb)() == len(dead)
            for each in dead:
                self.events[each].state = "new" if verb == "replay" else "gone"

    @rule(key=keys)
    def skip_the_head(self, key: str) -> None:
        head = self.of_key(key, *UNFINISHED)[:1]
        if head and self.is_free(key) and OutboxEvent.objects.filter(pk__in=head).skip():
            self.events[head[0]].state = "dead"

    @rule(drained=st.booleans())
    def purge(self, drained: bool) -> None:
        if drained:  # then streams are idle
            self.drain(None)
        for key in filter(self.is_free, KEYS):
            OutboxStream.objects.filter(stream__of_key=key, locked_by=None).update(
                locked_at=now() - timedelta(days=2)
            )
        OutboxStream.objects.purge()
        OutboxEvent.objects.purge()
        left = set(OutboxEvent.objects.values_list("pk", flat=True))
        for pk, each in self.events.items():
            if each.state == "done" and pk not in left:
                each.state = "gone"

    # -- what always holds -----------------------------------------------------------------------

    @invariant()
    def order_is_kept_and_nothing_is_lost(self) -> None:
        assert not self.wrong
        rows = dict(OutboxEvent.objects.values_list("pk", "status"))
        known = {pk: each for pk, each in self.events.items() if each.state != "gone"}
        assert rows.keys() == known.keys()
        for pk, each in known.items():
            assert rows[pk] in STATUS.get(each.state, PENDING), each

    @invariant()
    def no_stream_is_stuck(self) -> None:
        due = dict(OutboxStream.objects.values_list("key", "due_at"))
        for key in KEYS:
            stood = [*UNFINISHED, *["dead"] * self.blocks]
            first = min(self.of_key(key, *stood), key=lambda pk: self.events[pk].seq, default=None)
            if first is not None and self.events[first].state != "dead":
                assert due.get(key) is not None, f"{key} is stuck before {self.events[first]}"
            if self.of_key(key, *UNFINISHED, "dead"):
                assert key in due, f"{key} was purged, though it has events that may come"

    def teardown(self) -> None:
        try:
            if self.late is not None:
                self.end_the_other_session(False)
            if self.rival is not None:
                self.the_lease_of_the_rival_ends()
            for _ in range(99):
                if not any(each.state in (*UNFINISHED, "dead") for each in self.events.values()):
                    break
                for key in KEYS:
                    self.end_of_the_dead(key, "replay", first=False)
                self.time_moves_on()
                self.drain(None)
                self.order_is_kept_and_nothing_is_lost()
            assert {each.state for each in self.events.values()} <= {"done", "gone"}
        finally:
            self.listening.__exit__(None, None, None)
            self.settings.disable()


@pytest.mark.parametrize("on_dead", ["continue", "block"])
@pytest.mark.parametrize("stop", [True, False], ids=["stop", "go-on"])
def test_g1_streams_do_what_the_model_says(stop: bool, on_dead: str) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: Streams(stop, on_dead),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),
        ),
    )
