"""Batch listeners: workers die in mid batch, events fail alone and together, some have keys."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import cycle
from math import ceil, log2

from django.db import transaction
from django.db.models import Min

from tests.faults import clock
from tests.faults.calls import Batch, calls, crowded
from tests.faults.calls import batches as batches_of
from tests.faults.rig import Rig
from tests.faults.scenarios.registry import ALL, scenario
from tests.waiting import wait_until

KINDS = ("bulk", "answered", "staged", "gathered", "ledger", "ledger")
PER_KEY = {"bulk": 3, "staged": 3}  # events of a key in a call, at most; others: one
OUTAGE = 0.1  # seconds: a few attempts of the ten
# Seconds that a call takes in which a worker is struck. On SQLite it keeps everybody from writing,
# and several in a row from renewing leases.
HELD, HELD_ON_SQLITE = 1.0, 0.1
IN_CALL = 8  # events that such a call has, at least

SIZE = 500  # of the batches of ``sifted``
EXECUTIONS = 5  # that their retry policy gives
TRIED = 2  # attempts that each event spends in an outage, at least
BAD = ("sifted.bad", "sifted.fatal")


@scenario(*ALL)
def batches(rig: Rig) -> None:
    """Batches are interrupted by kills, stops and lost leases; events fail, for a while all do."""
    rig.backlog = True
    kills, pauses, thefts, stops, outages = rig.pick(ci=(4, 1, 2, 1, 1), full=(50, 8, 8, 8, 8))
    if rig.server is None:  # where the call that is robbed keeps everybody from writing
        thefts = 0
    lease, pace = rig.outbox["LEASE"], rig.pick(ci=(0.2, 0.5), full=(0.5, 1.5))
    strikes = ["kill"] * kills + ["pause"] * pauses + ["theft"] * thefts
    strikes += ["stop"] * stops + ["outage"] * outages
    span = len(strikes) * (sum(pace) / 2 + 0.2) + pauses * 1.5 * lease
    rate = rig.pick(ci=150, full=300, sqlite=80)
    rig.start_workers(rig.pick(ci=2, full=4))
    rig.wait_until_they_run()
    rig.start_writers(
        2,
        events=int(rate * span),
        rate=rate,
        kinds=KINDS,
        keys=30,
        keyed=0.4,
        fail=0.02,
        slow=0.05,
        work=(0.0, 0.004),
    )
    rig.luck.shuffle(strikes)
    strikes += ["theft"] * (thefts > 0)  # no later kill ends what comes of it
    taken, failing = 0, cycle((True, False))
    for number in rig.schedule(len(strikes), pace):
        if strikes[number] == "kill":
            rig.kill(in_mid_call(rig)[0] if number % 2 else rig.one_that_runs())
        elif strikes[number] == "pause":
            # Halves of what failed meanwhile must not be called: somebody else has them.
            rig.pause(in_mid_call(rig, fails=next(failing))[0], 1.5 * lease)
        elif strikes[number] == "theft":
            place, ids = in_mid_call(rig)
            taken += rig.take_over(place, ids[::2])
        elif strikes[number] == "stop":
            rig.hand_over(rig.one_that_runs())
        else:
            fail_together(rig)
    rig.wait_for_writers()
    rig.settle_down()
    rig.nothing_disturbed(locked=True)  # by an atomic listener
    if thefts:
        rig.measure("leases taken over in mid call", taken, least=1)
    measure_ledger(rig)
    measure_calls(rig)


def in_mid_call(rig: Rig, *, fails: bool = False) -> tuple[int, list[str]]:
    """Have ``ledger`` called for a while, or ``bulk``, which then fails.

    Return the place of the worker, and those events.
    """
    rig.one_that_runs()
    offset = rig.witness.stat().st_size
    held = HELD_ON_SQLITE if rig.server is None else HELD
    kind, payload = ("bulk", {"hold": held}) if fails else ("ledger", {"seconds": held})
    with transaction.atomic():
        ids = [rig.write(kind, payload) for _ in range(IN_CALL - fails)]
        ids += [rig.write(kind, {**payload, "fail": 1}) for _ in range(fails)]
    pid = rig.wait_for_a_start(ids, offset)
    return [worker.pid for worker in rig.workers].index(pid), ids


def fail_together(rig: Rig) -> None:
    """Have everything fail for a while, and one event of a key whose followers do not."""
    for number in range(60):
        rig.write(KINDS[number % len(KINDS)], {"until": time.monotonic() + OUTAGE})
    for kind in PER_KEY:
        with transaction.atomic():
            for number in range(30):  # of ten keys
                failing = {"fail": 1} if 10 <= number < 20 else {}
                rig.write(kind, failing, key=f"failing-{kind}-{number % 10}")


def measure_ledger(rig: Rig) -> None:
    """Compare what the atomic listener left with what the events say."""
    from django_outbox.models import OutboxEvent
    from tests.faults.models import Booking, Intent

    intended = Intent.objects.filter(kind="ledger").values("event_id")
    done = OutboxEvent.objects.filter(status=1, pk__in=intended)
    expected: Counter[str] = Counter(done.values_list("pk", flat=True))
    booked: Counter[str] = Counter(Booking.objects.values_list("event_id", flat=True))
    wrong = (expected - booked) + (booked - expected)
    rig.measure("bookings of an atomic batch listener", booked.total(), least=1)
    rig.measure("of those, more or fewer than done events say", wrong.total(), most=0)


def measure_calls(rig: Rig) -> None:
    evidence = rig.evidence()
    found = calls(evidence.lines)
    keys = {each.event_id: each.key for each in evidence.intents.values()}
    most = {each.event_id: PER_KEY.get(each.kind, 1) for each in evidence.intents.values()}
    rig.measure("events in a call, most", max(len(each.events) for each in found), least=2)
    rig.measure("calls with too many events of a key", crowded(found, keys, most), most=0)


# -- poison, and an outage, without crashes --------------------------------------------------------


@scenario(*ALL)
def poisoned_batches(rig: Rig) -> None:
    """One event in a hundred is bad for its batch of 500; then all fail for a while."""
    rig.backlog, rig.mortal = True, BAD
    rig.outbox["LEASE"] = 30.0  # nothing crashes
    rig.outbox["RETRY"] = {"policy": "fixed", "delay": 0.2, "max_attempts": EXECUTIONS}
    rig.patience *= rig.pick(ci=1, full=5)
    ids = rig.put(rig.pick(ci=3000, full=100_000), "sifted.good")
    bad = rig.luck.sample(ids, len(ids) // 100)
    for number, kind in enumerate(BAD):
        rig.turn_into(kind, bad[number :: len(BAD)])
    rig.start_workers(2)
    rig.settle_down()
    rig.put(rig.pick(ci=1000, full=5000), "away")
    wait_until(lambda: fewest_attempts("away") >= TRIED, within=60, what="attempts in the outage")
    until = clock.now()
    rig.heal()
    rig.settle_down()
    rig.nothing_disturbed()
    rig.measure("settles that were refused", len(rig.logged("settles refused")), most=0)
    measure_poison(rig, until)


def fewest_attempts(kind: str) -> int:
    from django_outbox.models import OutboxEvent

    found = OutboxEvent.objects.filter(event_type=f"fault.{kind}").aggregate(least=Min("attempts"))
    return int(found["least"])


def measure_poison(rig: Rig, until: float) -> None:
    evidence = rig.evidence()
    found = batches_of(calls(evidence.lines))
    of = {
        kind: {each.event_id for each in evidence.intents.values() if each.kind == kind}
        for kind in ("sifted.good", "away", *BAD)
    }
    good, bad = of["sifted.good"], of["sifted.bad"] | of["sifted.fatal"]
    ends: Counter[str] = Counter()
    lasts: dict[str, str] = {}  # how its last call ended, by event
    seen: dict[str, set[int]] = {}  # what it was told of its attempts, by event
    for batch in found:
        for call in batch.calls:
            ends.update(call.ended_well())
            lasts.update(call.outcomes)
            for event_id, attempts in call.events.items():
                seen.setdefault(event_id, set()).add(attempts)

    def count(ids: set[str], wrong: Callable[[str], bool]) -> int:
        return sum(each not in evidence.rows or wrong(each) for each in ids)

    rows = evidence.rows
    rig.measure("good events", len(good))
    not_once = count(good, lambda each: rows[each].status != 1 or ends[each] != 1)
    rig.measure("good events not done exactly once", not_once, most=0)
    rig.measure("good events dead", count(good, lambda each: rows[each].status == 3), most=0)
    often = count(good, lambda each: rows[each].attempts > 2)
    rig.measure("good events with more than two attempts", often, most=0)
    rig.measure("bad events", len(bad))

    def survived(event_id: str) -> bool:
        """Say whether it is not dead of a call of its own, the last that its policy gives."""
        row, tried = rows[event_id], len(seen.get(event_id, ()))
        if row.status != 3 or lasts.get(event_id) != "failed" or ends[event_id]:
            return True
        return event_id in of["sifted.bad"] and not tried == row.attempts == EXECUTIONS

    rig.measure("bad events not dead after the executions due", count(bad, survived), most=0)
    measure_splits(rig, found, good, bad)
    measure_outage(rig, [each for each in found if each.events.keys() <= of["away"]], until)


def measure_splits(rig: Rig, found: list[Batch], good: set[str], bad: set[str]) -> None:
    rig.measure("events in a batch, most", max(len(each.events) for each in found), least=SIZE / 2)
    poisoned = [each for each in found if len(each.events) > 1 and each.events.keys() & bad]
    number = [len(each.calls) for each in poisoned]
    rig.measure("batches with bad events", len(poisoned), least=1)
    rig.measure("calls for each of them, on average", sum(number) / len(number))
    single = [each for each in poisoned if len(each.events.keys() & bad) == 1]
    most = max((len(each.calls) for each in single), default=0)
    rig.measure("calls for one with a single bad event, most", most, most=1 + 2 * ceil(log2(SIZE)))
    failed = sum(len(each.events.keys() & good - each.ended_well()) for each in single)
    rig.measure("good events that failed with a single bad one", failed, most=0)


def measure_outage(rig: Rig, found: list[Batch], until: float) -> None:
    """Of the batches that were begun and ended while nothing could succeed."""
    inside = [
        each
        for each in found
        if len(each.events) > 1 and each.calls[-1].since < until and not each.ended_well()
    ]
    rig.measure("batches in an outage", len(inside), least=1)
    most = max((len(each.calls) for each in inside), default=0)
    rig.measure("calls for each of them and attempt, most", most, most=3)
