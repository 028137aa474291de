"""The state of queues: what is due in each, who serves it, and whether it is open."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError

from django_outbox.inspection import queues as inspected
from django_outbox.models import OutboxPause
from tests.table import insert, keyed, now
from tests.test_status import ask, check, run, worker

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def two_queues(settings: Any) -> None:
    settings.OUTBOX = {"QUEUES": {"hooks": {}}}


def serving(name: str, *queues: str, **columns: Any) -> None:
    worker(name, info=json.dumps({"queues": [*queues]}), **columns)


def queue(name: str = "hooks") -> dict[str, Any]:
    return queues()[name]


def queues() -> dict[str, dict[str, Any]]:
    return {each.pop("queue"): each for each in ask()["queues"]}


def breaker(name: str = "hooks", **columns: Any) -> OutboxPause:
    given = {"reason": "5 consecutive failures", "until": now() + timedelta(seconds=30)}
    return OutboxPause.objects.create(
        kind="breaker", name=name, paused_at=now(), pause_seconds=30, **{**given, **columns}
    )


# --- what is due ----------------------------------------------------------------------------------


def test_counts_stop_at_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspected, "COUNT_LIMIT", 3)
    insert(5, queue="hooks", due=-9)
    keyed("k", 2)
    assert [each["due"] for each in queues().values()] == [1, 3]


def test_in_writer_only_nothing_is_due_and_nothing_unserved(settings: Any) -> None:
    settings.OUTBOX = {"MODE": "writer_only", "QUEUES": {"hooks": {}}}
    insert(3, due=-3600, queue="hooks")
    found = queue()
    assert (found["due"], found["oldest_due_age"], found["unserved"]) == (0, None, False)
    assert check() == 0


# --- who serves it --------------------------------------------------------------------------------


def test_live_workers_are_counted_by_the_queues_that_they_serve() -> None:
    serving("all", "default", "hooks")
    serving("one", "default")
    serving("lost", "hooks", heartbeat_at=now() - timedelta(seconds=40))
    found = queues()
    assert {name: each["workers"] for name, each in found.items()} == {"default": 2, "hooks": 1}
    assert not any(each["unserved"] for each in found.values())
    assert {each["id"]: each["queues"] for each in ask()["workers"]} == {
        "all": ["default", "hooks"],
        "one": ["default"],
        "lost": ["hooks"],
    }


def test_a_worker_of_an_older_release_serves_all() -> None:
    worker("old", info=json.dumps({"mode": "multi_node"}))
    worker("older", info=None)
    insert(1, queue="gone")
    assert [each["workers"] for each in queues().values()] == [2, 2, 2]
    assert [each["queues"] for each in ask()["workers"]] == [None, None]


def test_a_queue_that_only_lost_workers_serve_is_unserved() -> None:
    serving("one", "default")
    serving("lost", "hooks", heartbeat_at=now() - timedelta(seconds=40))
    found = queues()
    assert (found["default"]["unserved"], found["hooks"]["unserved"]) == (False, True)


def test_check_says_which_queue_is_unserved_and_what_to_do() -> None:
    serving("one", "default")
    insert(2, queue="hooks", due=60)
    assert check() == 0  # nothing is due
    insert(2, queue="hooks")
    with pytest.raises(CommandError) as raised:
        run("--check")
    assert raised.value.returncode == 1
    assert re.fullmatch(
        r"default: No live worker serves queue hooks, where 2 have been due since [\d :-]+; "
        r"start one with --queue hooks\.",
        str(raised.value),
    )
    assert run()  # without --check nothing is compared
    serving("two", "hooks")
    assert check() == 0


def test_check_leaves_it_to_min_workers_that_no_worker_is_alive() -> None:
    """A cron job that runs ``outbox_worker --once`` leaves no live worker between its runs."""
    insert(2, queue="hooks")
    assert check() == 0
    assert check("--min-workers=1") == 1


def test_workers_of_default_deliver_from_queues_that_are_not_configured() -> None:
    insert(2, queue="gone")
    serving("one", "hooks")
    with pytest.raises(CommandError, match=r"queue gone, where 2 have been due"):
        run("--check")
    serving("two", "default")
    assert check() == 0


# --- what it costs --------------------------------------------------------------------------------


def test_many_queues_take_few_statements(settings: Any, django_assert_num_queries: Any) -> None:
    names = [f"q{number:02}" for number in range(15)]
    settings.OUTBOX = {"QUEUES": {name: {} for name in names}}
    for name in names:
        insert(1, queue=name)
    clock = now()
    with django_assert_num_queries(4):  # pauses, queues that are not configured, counts, minutes
        found = inspected.load_backlog("default", clock, [])
    assert [each.due for each in found.queues] == [0, *[1] * 15]
