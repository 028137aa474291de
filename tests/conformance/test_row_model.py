"""The life of a row agrees with a small model, in many generated histories.

``OUTBOX_EXAMPLES=2000`` runs that many histories instead of a few.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Q
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
from django_outbox.listeners.outcomes import DONE, Decision, Status
from django_outbox.models import OutboxEvent
from django_outbox.sql import dialect_of
from django_outbox.sql.values import RescueState
from tests.table import PLACED, claim, end_leases, endings, ids_of, leases, listening, now

pytestmark = pytest.mark.django_db(transaction=True)

EXAMPLES = int(os.environ.get("OUTBOX_EXAMPLES", "5"))
FAR = 600.0  # seconds until a failed or deferred event is due: only ``time_moves_on`` gets there
MOST = 3  # executions until an event is dead
ANSWERS = {"done": None, "defer": outbox.Defer(FAR), "die": outbox.Dead("told to")}
RETRY = Decision(status=Status.RETRY, delay=0.0, spent=1, error="by a rival", outcome="retry")
PENDING = (Status.NEW, Status.RETRY)

plans = st.lists(st.sampled_from(["fail", *ANSWERS]), max_size=4)
rivals = st.sampled_from(["rival", "thief"])


@dataclass
class Row:
    """What the model knows about a committed event."""

    plan: list[str]
    state: str = "due"  # "due", "waits", "held", "done", "dead", "gone"
    attempts: int = 0
    owner: str = ""  # of its lease
    rescues: int = 0


class Rows(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        OutboxEvent.objects.all().delete()
        self.rows: dict[str, Row] = {}
        self.claims: dict[str, list[str]] = {"rival": [], "thief": []}  # what each believes to hold
        self.wrong: list[str] = []
        self.settings = override_settings(
            OUTBOX={
                "RETENTION_DONE": 0.001,
                "RETENTION_DEAD": 0.001,
                "MAX_RESCUES": 100,
                "RETRY": {"policy": "fixed", "delay": FAR, "max_attempts": MOST},
            }
        )
        self.settings.enable()

    def of(self, *states: str) -> list[str]:
        return [pk for pk, each in self.rows.items() if each.state in states]

    # -- writers ---------------------------------------------------------------------------------

    @rule(plan=plans, delayed=st.booleans(), undone=st.booleans())
    def write(self, plan: list[str], delayed: bool, undone: bool) -> None:
        with transaction.atomic():
            when = {"deliver_after": FAR} if delayed else {}
            event_id = outbox.write(PLACED, {}, **when)  # type: ignore[arg-type]
            transaction.set_rollback(undone)
        if not undone:
            assert event_id is not None
            self.rows[event_id] = Row([*plan], "waits" if delayed else "due")

    # -- a worker --------------------------------------------------------------------------------

    def listener(self, event: outbox.Event) -> Any:
        found = self.rows.get(event.event_id)
        if found is None or found.state != "due" or event.attempts != found.attempts:
            self.wrong.append(f"delivered {event}, attempts={event.attempts}, which is {found}")
            return None
        found.owner, found.rescues = "", 0  # the worker survived the listener
        answer = found.plan.pop(0) if found.plan else "done"
        found.state = {"fail": "waits", "defer": "waits", "die": "dead", "done": "done"}[answer]
        if answer == "fail":
            found.attempts += 1
            found.state = "waits" if found.attempts < MOST else "dead"
            raise ValueError("told to")
        return ANSWERS[answer]

    @rule(limit=st.none() | st.integers(1, 3))
    def drain(self, limit: int | None) -> None:
        due = self.of("due")
        with listening(self.listener):
            count = outbox.drain(limit=limit)
        assert count == (len(due) if limit is None else min(limit, len(due)))

    # -- other workers ---------------------------------------------------------------------------

    @rule(me=rivals, limit=st.integers(1, 3), state=st.sampled_from(RescueState))
    def a_rival_claims(self, me: str, limit: int, state: RescueState) -> None:
        taken = ids_of(claim(me, lease=FAR, limit=limit, state=state))
        for each in taken:
            row = self.rows[each]
            if row.state != "due":
                self.wrong.append(f"{me} took {row}")
            row.rescues += row.owner not in ("", me)
            row.state, row.owner = "held", me
        self.claims[me] += [each for each in taken if each not in self.claims[me]]

    @precondition(lambda self: any(self.claims.values()))
    @rule(me=rivals, retries=st.booleans())
    def a_rival_settles(self, me: str, retries: bool) -> None:
        """Settle all that it believes to hold; rows that others have taken do not change."""
        held, self.claims[me] = self.claims[me], []
        mine = [each for each in held if self.rows[each].owner == me]
        pairs = [(each, RETRY if retries else DONE) for each in held]
        if pairs:
            count = dialect_of(connection).settle_all(me=me, endings=endings(pairs))
            assert count == len(mine)
        for each in mine:
            row = self.rows[each]
            row.attempts += retries
            row.state, row.owner, row.rescues = ("due" if retries else "done"), "", 0

    @precondition(lambda self: any(self.claims.values()))
    @rule(me=rivals)
    def a_rival_renews(self, me: str) -> None:
        held = self.claims[me]
        dialect = dialect_of(connection)
        mine: set[str] = set()
        if held:
            _, mine = dialect.renew(me=me, leases=leases(held), lease=FAR)
        assert mine == {each for each in held if self.rows[each].owner == me}
        for each in mine:
            self.rows[each].state = "held"

    @rule(me=rivals)
    def a_rival_releases(self, me: str) -> None:
        held, self.claims[me] = self.claims[me], []
        mine = [each for each in held if self.rows[each].owner == me]
        if held:
            assert dialect_of(connection).release(me=me, leases=leases(held)) == len(mine)
        for each in mine:
            self.rows[each].state, self.rows[each].owner = "due", ""

    @precondition(lambda self: self.of("held"))
    @rule()
    def leases_end(self) -> None:
        end_leases(self.of("held"))
        for each in self.of("held"):
            self.rows[each].state = "due"  # the old owner's name stays in the row

    @rule(retries=st.booleans())
    def a_rival_takes_over_and_both_settle(self, retries: bool) -> None:
        """The fence exists for this history, which is too rare if left to chance."""
        if not self.of("held"):
            self.write([], delayed=False, undone=False)
            self.a_rival_claims("rival", 3, RescueState.ORDINARY)
        lost = self.rows[self.of("held")[0]].owner
        me = "thief" if lost == "rival" else "rival"
        self.leases_end()
        for state in RescueState:
            self.a_rival_claims(me, 3, state)
        self.a_rival_settles(lost, not retries)
        self.the_table_is_what_the_model_says()
        self.a_rival_settles(me, retries)

    # -- time, replays and purges ----------------------------------------------------------------

    @rule()
    def time_moves_on(self) -> None:
        end_leases(self.of("waits"))
        for each in self.of("waits"):
            self.rows[each].state = "due"

    @rule(verb=st.sampled_from(["replay", "discard"]), first=st.booleans())
    def end_of_the_dead(self, verb: str, first: bool) -> None:
        dead = self.of("dead")[: 1 if first else None]
        some = OutboxEvent.objects.filter(pk__in=[*dead, *self.of("due", "waits", "done")])
        some = some.exclude(Q(status=Status.DEAD) & ~Q(pk__in=dead))
        assert getattr(some, verb)() == len(dead)  # the other rows are not dead
        for each in dead:
            row = self.rows[each]
            row.state, row.attempts, row.rescues = ("due" if verb == "replay" else "gone"), 0, 0

    @rule()
    def purge(self) -> None:
        OutboxEvent.objects.filter(status__in=[Status.DONE, Status.DEAD]).update(
            done_at=now() - timedelta(seconds=1)
        )
        assert OutboxEvent.objects.purge() == len(self.of("done", "dead"))
        for each in self.of("done", "dead"):
            self.rows[each].state = "gone"

    # -- invariants ------------------------------------------------------------------------------

    @invariant()
    def the_table_is_what_the_model_says(self) -> None:
        assert not self.wrong
        rows = {each.event_id: each for each in OutboxEvent.objects.all()}
        assert rows.keys() == set(self.of("due", "waits", "held", "done", "dead"))
        for pk, stored in rows.items():
            known = self.rows[pk]
            finished = {"done": (Status.DONE,), "dead": (Status.DEAD,)}.get(known.state, PENDING)
            assert stored.status in finished, known
            assert (stored.available_at is None) == (known.state in ("done", "dead")), known
            assert (stored.locked_by or "") == known.owner, known
            if known.state != "done":
                assert (stored.attempts, stored.rescues) == (known.attempts, known.rescues), known

    def teardown(self) -> None:
        try:
            for _ in range(99):
                if not self.of("due", "waits", "held", "dead"):
                    break
                if self.of("held"):
                    self.leases_end()
                self.end_of_the_dead("replay", first=False)
                self.time_moves_on()
                self.drain(None)
                self.the_table_is_what_the_model_says()
            assert {each.state for each in self.rows.values()} <= {"done", "gone"}
        finally:
            self.settings.disable()


def test_g4_w22_rows_do_what_the_model_says() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Rows,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),
        ),
    )
