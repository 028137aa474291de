"""Worker processes whose server goes away, or ends their sessions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_outbox.listeners.outcomes import Status
from tests import databases
from tests.fleet import Fleet, wait_for_end_of, wait_until
from tests.reach.children import Site
from tests.relay import Relay
from tests.table import row, write
from tests.test_health import PORT, QUICK, Answer, ask, port_of, wait_for
from tests.test_process import Workers, effects, quick, wait_until_all_done, workers
from tests.test_stops_process import LONG, fleet, wait_for_start

pytestmark = pytest.mark.django_db(transaction=True)


__all__ = ["fleet", "workers"]  # fixtures

NO_SERVER = pytest.mark.skipif(
    databases.vendor() == "sqlite", reason="SQLite has no server that could go away"
)


@pytest.fixture
def relay() -> Iterator[Relay]:
    relay = Relay()
    yield relay
    relay.cut()


@NO_SERVER
def test_48_database_down_at_the_start_and_again_later(workers: Workers, relay: Relay) -> None:
    settings = {"default": relay.settings(), "other": relay.settings()}
    worker = workers.start(**databases.environment(settings))
    wait_until(lambda: workers.logged("claimer failed"), what="the first complaint")
    wait_until(lambda: len(workers.logged(" failed ")) >= 4, what="others complain, too")
    assert worker.is_running()
    assert len(workers.log.read_text().splitlines()) < 60  # a bounded rate, and no tracebacks
    assert not workers.logged("Traceback")

    quick(5)
    relay.open()
    wait_until_all_done()

    relay.cut()
    (event_id,) = quick(1)
    wait_until(lambda: len(workers.logged("claimer failed")) >= 2, what="another complaint")
    assert row(event_id).status == Status.NEW
    relay.open()
    wait_until_all_done()
    assert worker.is_running()
    assert workers.end(worker) == 0
    assert effects("end").total() == 6


@NO_SERVER
def test_a_database_that_is_away_holds_no_stop(fleet: Fleet) -> None:
    relay = Relay()
    relay.open()
    settings = {"default": relay.settings(), "other": relay.settings()}
    worker = fleet.start(**databases.environment(settings))
    try:
        (event_id,) = write(1, payload=LONG)
        wait_for_start(fleet, event_id)
        relay.cut()
        worker.terminate()
        assert wait_for_end_of(worker) == 1
    finally:
        relay.cut()
    assert fleet.logged("heartbeat not closed")
    assert row(event_id).locked_by is not None


@NO_SERVER
@pytest.mark.parametrize("processes", [1, 2])
def test_without_its_database_a_worker_lives_but_is_not_ready(site: Site, processes: int) -> None:
    relay = Relay()
    relay.open()
    env = databases.environment({"default": relay.settings(), "other": relay.settings()})
    command = ("django", "outbox_worker", *PORT, "--processes", str(processes))
    try:
        with site.run(*command, env=env, **QUICK) as child:
            port = port_of(child)
            wait_for(port, "/ready", 200)
            relay.cut()
            away = wait_for(port, "/ready", 503)
            assert "failed" in away.reasons
            assert "Error" in away.reasons  # only its class; its text may contain a user name
            assert "127.0.0.1" not in away.reasons
            assert ask(port, "/live") == Answer(200, {"status": "ok"})
            relay.open()
            wait_for(port, "/ready", 200)
            assert child.stop() == 0
    finally:
        relay.cut()
