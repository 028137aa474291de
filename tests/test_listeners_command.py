"""``outbox_status --listeners``: the registered listeners, and stored events that have none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import OperationalError, transaction

import django_outbox as outbox
from django_outbox.inspection.listeners import describe_listeners, unrouted_types
from django_outbox.listeners import callables, registry
from django_outbox.listeners.outcomes import Status
from tests.table import insert, listening, now
from tests.test_status import fails
from tests.test_status import run as run_status

pytestmark = pytest.mark.django_db(transaction=True)

DONE, DEAD = Status.DONE, Status.DEAD


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide the listeners of other test modules during a test."""
    monkeypatch.setattr(registry, "_listeners", {})
    registry._clear_route_caches()
    yield
    registry._clear_route_caches()


def hear(event: outbox.Event) -> None:
    """Do nothing."""


async def hear_later(event: outbox.Event) -> None:
    """Do nothing."""


def give_up(event: outbox.Event, failure: outbox.Failure) -> None:
    """Do nothing."""


def run(*arguments: str) -> str:
    return run_status("--listeners", *arguments)


def finished(status: int, **columns: Any) -> None:
    insert(1, due=None, status=status, done_at=now(), **columns)


def test_what_is_registered_is_described(settings: Any) -> None:
    """This includes the types, name, queue, function, retry, timeout and atomic."""
    settings.OUTBOX = {"QUEUES": {"hooks": {}}}
    retry = outbox.Fixed(delay=3, max_attempts=2)
    options: dict[str, Any] = {"aggregate_type": "shop.Order", "name": "stock", "queue": "hooks"}
    with (
        listening(hear, "order.placed", retry=retry, atomic=True, timeout=2.5, **options),
        listening(hear_later, "order.*"),
    ):
        hear.fallback(give_up)  # type: ignore[attr-defined]
        pattern, exact = describe_listeners()
        lines = run().splitlines()
    assert exact == {
        "event_type": "order.placed",
        "aggregate_type": "shop.Order",
        "name": "stock",
        "queue": "hooks",
        "listener": f"{__name__}.hear",
        "place": callables.location(hear),
        "options": ["atomic", "timeout 2.5 s", f"retry {retry!r}", f"fallback {__name__}.give_up"],
    }
    assert (pattern["event_type"], pattern["aggregate_type"]) == ("order.*", "*")
    assert (pattern["queue"], pattern["options"]) == ("default", ["async"])
    assert lines[2].split()[:7] == "EVENT TYPE AGGREGATE TYPE NAME QUEUE LISTENER".split()
    assert [each.split()[3] for each in lines[3:5]] == ["default", "hooks"]


def test_the_options_of_a_batch_listener_are_described() -> None:
    with listening(hear, "order.placed", batch=50, within=0.2, per_key=3):
        (found,) = describe_listeners()
    assert found["options"] == ["batch 50", "within 0.2 s", "per key 3"]


def test_what_has_no_listener_is_counted() -> None:
    text = run()
    for part in ("listeners       -", "without listener-"):
        assert part in text
    insert(2, event_type="order.lost")
    finished(DONE, event_type="order.lost")
    with listening(hear, "order.placed"):
        found = json.loads(run("--format", "json"))
        assert "order.lost  __GLOBAL__" in run()
    assert [each["event_type"] for each in found["listeners"]] == ["order.placed"]
    lost = {"event_type": "order.lost", "aggregate_type": "__GLOBAL__"}
    [missing] = found["databases"]["default"]["without_listener"]
    assert missing == {**lost, "events": 3, "unsettled": 2}


def test_routes_are_those_of_the_worker() -> None:
    insert(1, event_type="order.placed", aggregate_type="shop.Order")
    insert(1, event_type="order.placed", aggregate_type="shop.Cart")
    insert(1, event_type="parcel.sent")
    with listening(hear, "order.placed", aggregate_type="shop.Order"), listening(hear, "parcel.*"):
        [found] = unrouted_types("default")
    assert (found["event_type"], found["aggregate_type"]) == ("order.placed", "shop.Cart")


def test_the_worst_comes_first() -> None:
    for _ in range(5):
        finished(DONE, event_type="a")
    finished(DEAD, event_type="b")
    insert(2, event_type="c")
    assert [each["event_type"] for each in unrouted_types("default")] == ["c", "b", "a"]


def test_the_look_is_bounded() -> None:
    finished(DONE, event_type="old.done")
    insert(1, event_type="old.due", due=-500)
    finished(DONE, event_type="old.done")
    insert(3, event_type="new", due=60)
    found = {each["event_type"]: each["events"] for each in unrouted_types("default", limit=3)}
    assert found == {"new": 3, "old.due": 1}  # the newest, and those due first


def test_check_exits_1_for_what_is_not_done_and_has_no_listener() -> None:
    finished(DONE, event_type="order.done")
    run("--check")
    finished(DEAD, event_type="order.dead")
    assert fails("--listeners", "--check") == (1, "no listener for order.dead")
    insert(1, event_type="order.new", due=3600)
    assert fails("--listeners", "--check") == (1, "no listener for order.dead, order.new")
    run()  # without --check nothing is compared
    with listening(hear, "order.*"):
        run("--check")


def test_in_writer_only_nobody_is_missing(settings: Any) -> None:
    insert(1, event_type="order.lost")
    settings.OUTBOX = {"MODE": "writer_only"}
    assert unrouted_types("default") == []


def test_no_answer_is_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def down(alias: str) -> Any:
        raise OperationalError("connection refused")

    monkeypatch.setattr("django_outbox.management.views.unrouted_types", down)
    assert fails("--listeners") == (2, "default: connection refused")


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_each_alias_is_looked_into() -> None:
    with transaction.atomic(using="other"):
        outbox.write("order.lost", using="other")
    found = json.loads(run("--format", "json", "--database", "default", "--database", "other"))
    assert [len(each["without_listener"]) for each in found["databases"].values()] == [0, 1]
