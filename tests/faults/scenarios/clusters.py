"""What befalls a cluster of database servers, while workers and writers go on."""

from __future__ import annotations

import json
import time

from django.core.checks import run_checks
from django.db import connection

from tests.clusters import Nodes, Pair
from tests.faults.rig import Rig
from tests.faults.scenarios.registry import MIX, scenario

CONFLICTS = ("Deadlock found", "(3101", "(1180", "(1020")  # in the errors of a node


@scenario("pair")
def failover(rig: Rig) -> None:
    """The primary is killed, and its standby takes over."""

    def fail(pair: Pair) -> None:
        pair.kill()
        time.sleep(0.5)  # until somebody has noticed

    move(rig, fail, "restart immediate")


@scenario("pair")
def read_only_primary(rig: Rig) -> None:
    """The primary turns read-only with all sessions open, and its standby takes over."""
    move(rig, Pair.freeze, "restart fast")


def move(rig: Rig, leave: object, kind: str) -> None:
    pair = rig.server
    assert isinstance(pair, Pair) and callable(leave)
    rig.outbox["LEASE"] = 30.0  # longer than a move: no worker may lose what it holds
    rig.start_workers(rig.pick(ci=2, full=3))
    moves = rig.pick(ci=2, full=20)
    events = rig.pick(ci=800, full=100_000)
    rig.start_writers(
        2, events=events, rate=events / moves / rig.pick(ci=6, full=9), keys=50, **MIX
    )
    rig.wait_until_they_run()
    for _ in rig.schedule(moves, rig.pick(ci=(0.5, 1.5), full=(1.0, 3.0))):
        with rig.fault(kind):
            leave(pair)
            pair.promote()
        connection.close()  # ours is to the old primary
        rig.back.append(rig.wait_for_delivery())
        pair.join()
    rig.wait_for_writers()
    rig.settle_down()
    rig.measure("from the promotion to a delivery, s", max(rig.back), most=2, timed=True)


@scenario("galera")
def galera(rig: Rig) -> None:
    """Each connection is to a random Galera node; nodes are killed and join again."""
    lose_nodes(rig, rig.pick(ci=600, full=100_000))


@scenario("group")
def group_replication(rig: Rig) -> None:
    """Each connection is to a random primary of a group; primaries are killed and join again."""
    lose_nodes(rig, rig.pick(ci=600, full=20_000))  # three servers on one machine are slow


def lose_nodes(rig: Rig, events: int) -> None:
    nodes = rig.server
    assert isinstance(nodes, Nodes)
    rig.outbox["LEASE"] = 30.0  # longer than the others need to see that a node has gone
    rig.environment["FAULTS_POOLED"] = json.dumps(nodes.way)
    found = {each.id for each in run_checks(databases=["default"])}
    rig.start_workers(3)
    kills = rig.pick(ci=1, full=10)
    rig.start_writers(
        3, events=events, rate=events / kills / rig.pick(ci=10, full=40), keys=50, **MIX
    )
    rig.wait_until_they_run()
    for _ in rig.schedule(kills, rig.pick(ci=(2.0, 3.0), full=(5.0, 10.0))):
        number = rig.luck.choice([1, 2])
        with rig.fault("restart kill"):
            nodes.kill(number)
            rig.back.append(rig.wait_for_delivery())
        nodes.join(number)
    rig.wait_for_writers()
    rig.settle_down()
    rig.measure("from a kill to a delivery, s", max(rig.back), most=15, timed=True)
    rig.measure("checks that tell of the cluster", len(found & {"django_outbox.W061"}), least=1)
    beaten = [
        line
        for line in rig.logged(" ERROR ") + rig.logged(" WARNING ")
        if any(each in line for each in CONFLICTS)
    ]
    rig.measure("conflicts that were logged as errors", len(beaten), most=0)
    rig.figures[-1].examples = beaten[:5]
