"""Until when a worker counts on a lease: from before the statement that leased or renewed it.

The database counts from when it executes the statement; its answer may come much later.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest

from django_outbox.conf import Settings
from django_outbox.delivery.lease import Lease, columns_of, lease_from_row
from django_outbox.listeners.outcomes import DONE
from django_outbox.sql.values import FULL, KEYED, Branch, Claimed, StreamRows
from django_outbox.worker.claims import Claims
from django_outbox.worker.effects import perform
from django_outbox.worker.heartbeat import renew
from django_outbox.worker.held import SAFE_PART, Held
from django_outbox.worker.leases import ActiveLease, Leader, Releases
from django_outbox.worker.pauses import KnownPauses
from django_outbox.worker.polling import Wakeup
from django_outbox.worker.runs import Runs, StreamRead
from tests.unit.scripted import (
    NOW,
    SCRIPTED,
    Clock,
    claimed_row,
    connection,
    lease,
    row,
    run_of,
    stream,
)

LEASE = 30.0  # seconds
SAFE = SAFE_PART * LEASE  # seconds
KEY = "order-1"
STREAM = f":{KEY}"


class Parts:
    """What a worker has for one event, without its threads."""

    def __init__(self) -> None:
        self.held, self.settings, self.ready = Held(LEASE), Settings(), list[Lease]()
        self.pools: Any = Mock(put=self.ready.extend, accepts=lambda queue: True)
        self.runs = Runs(
            me="me", settings=self.settings, held=self.held, pools=self.pools, wakeup=Wakeup()
        )
        self.releases = Releases(alias=SCRIPTED, runs=self.runs)
        self.claims = Claims(releases=self.releases, known_pauses=KnownPauses(), gates={})

    def has(self, deadline: float, *, key: str | None = None) -> None:
        """Lease the event, or its stream, until ``deadline`` (monotonic)."""
        if key is None:
            self.ready += self.held.add_rows([lease("a", deadline=deadline)])
        else:
            run = stream(key, deadline=deadline)
            self.held.add([run])
            self.runs.add_events([StreamRead(run, 1, [lease("a", of=run)], 0.0)])

    def beat(self) -> None:
        perform(connection(), renew(self.releases))

    def may_start(self) -> bool:
        (found,) = self.ready
        return self.held.is_current(found)


def claim_event(parts: Parts) -> Callable[[], bool]:
    claims = parts.claims
    perform(connection(), claims.claim_rows(claims.of([Branch("default", 1)])))
    return parts.may_start


def claim_known_event(parts: Parts) -> Callable[[], bool]:
    parts.has(0.0)
    return claim_event(parts)


def claim_stream(parts: Parts) -> Callable[[], bool]:
    perform(connection(), parts.claims.claim_streams({"default": 1}, scan=True))
    return parts.may_start


def claim_known_stream(parts: Parts) -> Callable[[], bool]:
    parts.has(0.0, key=KEY)
    return claim_stream(parts)


def renew_event(parts: Parts) -> Callable[[], bool]:
    parts.has(0.0)
    parts.beat()
    return parts.may_start


def renew_stream(parts: Parts) -> Callable[[], bool]:
    parts.has(0.0, key=KEY)
    parts.beat()
    return parts.may_start


def take_named_lease(parts: Parts) -> Callable[[], bool]:
    leader = Leader(me="me", name="purge", lease=LEASE)
    leader.take(connection())
    return lambda: leader.holds


def renew_named_lease(parts: Parts) -> Callable[[], bool]:
    leader = Leader(me="me", name="purge", lease=LEASE)
    perform(connection(), leader.renew(""))
    return lambda: leader.holds


def take_active_lease(parts: Parts) -> Callable[[], bool]:
    active = ActiveLease(me="me", lease=LEASE, poll=1.0)
    perform(connection(), active.step())
    return lambda: active.leader.holds


# What is leased or renewed, the statement that does it, and its answer.
CASES: list[tuple[Callable[[Parts], Callable[[], bool]], str, Any]] = [
    (claim_event, "claim", Claimed([claimed_row("a")])),
    (claim_known_event, "claim", Claimed([claimed_row("a", was="me")])),
    (claim_stream, "claim", Claimed([(STREAM, "default", 0, NOW, None, NOW)])),
    (claim_known_stream, "claim", Claimed([(STREAM, "default", 0, NOW, "me", NOW)])),
    (renew_event, "renew", ({"a"}, {"a"})),
    (renew_stream, "renew", ({STREAM}, {STREAM})),
    (take_named_lease, "take_lease", True),
    (renew_named_lease, "note_lease", True),
    (take_active_lease, "take_lease", True),
]


@pytest.mark.parametrize(
    ("seconds", "is_ours"),
    [(0.0, True), (SAFE - 0.5, True), (SAFE + 0.5, False)],
    ids=["at once", "soon enough", "too late"],
)
@pytest.mark.parametrize(
    ("act", "statement", "answer"), CASES, ids=[each[0].__name__ for each in CASES]
)
def test_a_lease_counts_from_before_its_statement(
    act: Callable[[Parts], Callable[[], bool]],
    statement: str,
    answer: Any,
    seconds: float,
    is_ours: bool,
    clock: Clock,
    dialect: Any,
) -> None:
    def execute(*args: Any, **kwargs: Any) -> Any:
        clock.advance(seconds)
        return answer

    getattr(dialect, statement).side_effect = execute
    read = StreamRows(STREAM, 1, NOW, [row("a", (*KEYED, "routed_until"), key=KEY, seq=1)])
    dialect.read_streams.return_value = [read]
    assert act(Parts())() is is_ours


LATER = NOW + timedelta(seconds=40)
RENEWALS: dict[str, tuple[Callable[[Parts], object], str, Any]] = {
    "event": (claim_known_event, "claim", claimed_row("a", was="me", at=LATER)),
    "stream": (claim_known_stream, "claim", (STREAM, "default", 0, NOW, "me", LATER)),
}


@pytest.mark.parametrize("name", RENEWALS)
def test_what_a_claim_renews_goes_on_by_the_new_lease(name: str, dialect: Any) -> None:
    act, statement, answer = RENEWALS[name]
    getattr(dialect, statement).return_value = Claimed([answer])
    parts = Parts()
    act(parts)
    (found,) = parts.ready
    assert found.locked_at == LATER


def test_a_claim_brings_nothing_back_that_has_ended_as_done_since_it_began() -> None:
    """Its statement had leased the row anew before the settle, and its answer comes late."""
    held, first = Held(LEASE), lease("a")
    held.add_rows([first])
    held.begin_claim()
    held.settled([(first, DONE)])
    found = claimed_row("a", was="me")
    again = lease_from_row(found, columns_of(FULL), run=run_of(found), me="me")
    assert held.add_rows([again]) == []
    assert not len(held)
    held.begin_claim()  # the next claim leases it for another reason
    assert held.add_rows([again]) == [again]
