"""No process uses the session of another: workers embedded in web servers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from tests.fleet import wait_until
from tests.reach.children import nothing_is_left
from tests.table import statuses
from tests.test_embedded import FAR, SERVERS, effects, serving, stop
from tests.testapp.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("name", SERVERS)
def test_39_a_request_is_followed_by_its_listener_in_the_same_process(
    name: str, database_env: dict[str, str], tmp_path: Path
) -> None:
    processes = 2 if "2" in SERVERS[name] else 1
    answers: list[dict[str, Any]] = []

    def delivers_its_own() -> bool:
        """Return whether each process has delivered an event that it wrote, from memory."""
        with ThreadPoolExecutor(6) as pool:
            answers.extend(pool.map(lambda _: server.write(), range(6)))
        all_done(answers)
        # A poll that runs at that moment, in any process, may be faster than the hot queue.
        found = effects("hot")
        writers = pids_by_event(answers)
        return (
            len({pid for each, pid in writers.items() if each in found and found[each].pid == pid})
            == processes
        )

    with serving(name, database_env, tmp_path, **FAR) as server:
        wait_until(delivers_its_own, what="a delivery in each process that wrote")
        stop(server)
    share_no_session(answers, effects())
    if name != "runserver reloading":
        nothing_is_left()


def all_done(answers: list[dict[str, Any]]) -> None:
    count = len(pids_by_event(answers))
    wait_until(lambda: statuses() == {"DONE": count}, what=f"{count} DONE")


def pids_by_event(answers: list[dict[str, Any]]) -> dict[str, int]:
    return {event_id: each["pid"] for each in answers for event_id in each["ids"]}


def share_no_session(answers: list[dict[str, Any]], done: dict[str, Effect]) -> None:
    """Check that no database session is used by two processes: none was opened before a fork."""
    users: dict[str, set[int]] = {}
    for each in answers:
        users.setdefault(each["session"], set()).add(each["pid"])
    for effect in done.values():
        users.setdefault(effect.worker, set()).add(effect.pid)
    if connection.vendor != "sqlite":
        assert "" not in users
        assert all(len(pids) == 1 for pids in users.values())
