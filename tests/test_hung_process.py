"""Real ``outbox_worker`` processes whose listeners hang, with a timeout and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fleet import wait_until
from tests.reach.children import Site
from tests.table import row, statuses, write
from tests.test_health import PORT, ask, port_of, wait_for
from tests.testapp.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

TIMEOUT = 4  # seconds; of a listener that hangs, and enough for one that does not
QUICK: dict[str, Any] = {
    "POLL_INTERVAL": 0.2,
    "LOCK_WAIT": 1,
    "RETRY": {"policy": "fixed", "delay": 0.1},
}


def hang(times: int = 1) -> str:
    return write(1, "reach.hangs", payload={"times": times})[0]


def tried(event_id: str) -> list[str]:
    return [*Effect.objects.filter(event_id=event_id).values_list("phase", flat=True)]


def done(*ids: str) -> None:
    wait_until(lambda: all(row(each).status == 1 for each in ids), what=f"{statuses()}")


def test_a_hung_listener_costs_one_thread_and_a_pool_of_them_the_process(
    site: Site, tmp_path: Path
) -> None:
    """The events are tried again by threads in their place, and a worker with none left exits 1."""
    until = tmp_path / "go on"
    settings = {**QUICK, "WORKERS": 2, "LISTENER_TIMEOUT": TIMEOUT, "DRAIN_TIMEOUT": 100}
    with site.worker(*PORT, **settings) as child:
        port = port_of(child)
        wait_for(port, "/ready", 200)
        write(1, "reach.patient", payload={"until": str(until)})
        wait_until(lambda: Effect.objects.filter(phase="start").exists())
        first = hang()
        done(first)
        assert tried(first) == ["try 0", "try 1"]
        assert ask(port, "/live").code == 200  # type: ignore[union-attr]
        second = hang()
        dead = wait_for(port, "/live", 503)
        assert "2 threads hang in listeners past their timeouts" in dead.reasons
        until.touch()
        assert child.wait(30) == 1
        assert child.output.count("only a new process helps threads=2") == 1
        assert child.output.count("listener runs longer than its timeout") == 2
    with site.worker(**settings) as fresh:
        done(first, second)
        assert fresh.stop() == 0
    assert [row(each).attempts for each in (first, second)] == [1, 1]
    assert statuses() == {"DONE": 3}
