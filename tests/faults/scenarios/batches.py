"""Batch listeners: workers die in mid batch, events fail alone and together, some have keys."""

from __future__ import annotations

import time

from tests.faults.rig import Rig
from tests.faults.scenarios.registry import ALL, scenario

KINDS = ("bulk", "answered", "ledger")
OUTAGE = 0.1  # seconds: a few attempts of the ten


@scenario(*ALL)
def batches(rig: Rig) -> None:
    """Batches are cut off by kills and pauses; some events fail, for a while all do."""
    rig.backlog = True
    kills, pauses, outages = rig.pick(ci=(4, 1, 1), full=(50, 8, 8))
    lease, pace = rig.outbox["LEASE"], rig.pick(ci=(0.4, 0.8), full=(0.5, 1.5))
    span = (kills + pauses + outages) * sum(pace) / 2 + pauses * 1.5 * lease + outages
    rate = rig.pick(ci=150, full=300, sqlite=80)
    rig.start_workers(rig.pick(ci=2, full=4))
    rig.wait_until_they_run()
    rig.start_writers(
        2, events=int(rate * span), rate=rate, kinds=KINDS, keys=30, keyed=0.4, fail=0.02,
        slow=0.05, work=(0.0, 0.004),
    )  # fmt: skip
    strikes = ["kill"] * kills + ["pause"] * pauses + ["outage"] * outages
    rig.luck.shuffle(strikes)
    for number in rig.schedule(len(strikes), pace):
        if strikes[number] == "kill":
            rig.kill(rig.one_that_runs())
        elif strikes[number] == "pause":
            rig.pause(rig.one_that_runs(), 1.5 * lease)
        else:  # everything fails for a while
            for place in range(60):
                rig.write(KINDS[place % 3], {"until": time.monotonic() + OUTAGE})
    rig.wait_for_writers()
    rig.settle_down()
    rig.nothing_disturbed()
