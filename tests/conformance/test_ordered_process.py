"""Keyed events while worker processes are killed: a short run of ``ordered_chaos``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import databases
from tests.fleet import Fleet
from tests.ordered_chaos import OUTBOX, Chaos

pytestmark = pytest.mark.django_db(transaction=True)


SQLITE = databases.vendor() == "sqlite"  # a paused process may block all writers there


def test_kills_and_pauses_leave_the_order_and_lose_nothing(
    database_env: dict[str, str], tmp_path: Path
) -> None:
    fleet = Fleet(database_env, tmp_path, **OUTBOX)
    try:
        found = Chaos(fleet, {**database_env, "PYTHONPATH": "."}, seed=1).run(
            events=240, keys=20, workers=2, kills=2, pauses=0 if SQLITE else 1, within=60
        )
    finally:
        fleet.kill_all()
    assert (found["lost"], found["ghosts"], found["inversions"]) == (0, 0, 0)
    assert found["done"] == found["events"] == found["committed"] >= 240
    assert found["faults"]["kill"] == 2
    assert found["clocks"][0] < -500 and found["clocks"][1] > 500
