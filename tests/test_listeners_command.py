"""``outbox_listeners``: the registered listeners, and the stored events that have none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, transaction

import django_outbox as outbox
from django_outbox.inspection.listeners import describe_listeners, listener_options, unrouted_types
from django_outbox.listeners import registry
from django_outbox.listeners.outcomes import Status
from tests.table import insert, listening, now

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
    out = StringIO()
    call_command("outbox_listeners", *arguments, stdout=out)
    return out.getvalue()


def code(*arguments: str) -> int:
    try:
        run(*arguments)
    except CommandError as error:
        return error.returncode
    return 0


def finished(status: int, **columns: Any) -> None:
    insert(1, due=None, status=status, done_at=now(), **columns)


def test_what_is_registered_is_described() -> None:
    """This includes the types, name, function, retry, timeout and atomic."""
    retry = outbox.Fixed(delay=3, max_attempts=2)
    options: dict[str, Any] = {"aggregate_type": "shop.Order", "name": "stock", "timeout": 5}
    with (
        listening(hear, "order.placed", retry=retry, atomic=True, **options),
        listening(hear_later, "order.*"),
    ):
        hear.fallback(give_up)  # type: ignore[attr-defined]
        pattern, exact = describe_listeners()
    assert exact == {
        "event_type": "order.placed",
        "aggregate_type": "shop.Order",
        "name": "stock",
        "queue": "default",
        "function": f"{__name__}.hear",
        "place": registry.location(hear),
        "retry": repr(retry),
        "own_retry": True,
        "timeout": 5,
        "atomic": True,
        "is_async": False,
        "fallback": f"{__name__}.give_up",
        "batch": None,
        "within": None,
        "per_key": None,
    }
    assert pattern["event_type"] == "order.*"
    assert pattern["aggregate_type"] == "*"
    assert (pattern["is_async"], pattern["own_retry"]) == (True, False)
    assert "Exponential" in pattern["retry"]


def test_the_options_of_a_batch_listener_are_described() -> None:
    with listening(hear, "order.placed", batch=50, within=0.2, per_key=3):
        (found,) = describe_listeners()
    assert (found["batch"], found["within"], found["per_key"]) == (50, 0.2, 3)
    assert [*listener_options(found)] == ["batch 50", "within 0.2 s", "per key 3"]


def test_the_table_names_listeners_and_what_has_none() -> None:
    insert(2, event_type="order.lost")
    with listening(hear, "order.placed", timeout=2.5, atomic=True), listening(hear_later, "x"):
        text = run()
    for part in (
        "EVENT TYPE",
        f"{__name__}.hear",
        "atomic, timeout 2.5 s",
        "async",
        "[default]",
        "order.lost  __GLOBAL__",
    ):
        assert part in text


def test_nobody_and_nothing_is_said() -> None:
    text = run()
    assert "No listener is registered." in text
    assert "Every event type that was seen has a listener." in text


def test_json_is_for_programs() -> None:
    insert(2, event_type="order.lost")
    finished(DONE, event_type="order.lost")
    with listening(hear, "order.placed"):
        found = json.loads(run("--format", "json"))
    assert [each["event_type"] for each in found["listeners"]] == ["order.placed"]
    assert found["missing"] == {
        "default": [
            {
                "event_type": "order.lost",
                "aggregate_type": "__GLOBAL__",
                "events": 3,
                "unsettled": 2,
            }
        ]
    }


def test_routes_are_those_of_the_worker() -> None:
    insert(1, event_type="order.placed", aggregate_type="shop.Order")
    insert(1, event_type="order.placed", aggregate_type="shop.Cart")
    insert(1, event_type="parcel.sent")
    with listening(hear, "order.placed", aggregate_type="shop.Order"), listening(hear, "parcel.*"):
        [found] = unrouted_types("default")
    assert (found.event_type, found.aggregate_type) == ("order.placed", "shop.Cart")


def test_the_worst_comes_first() -> None:
    for _ in range(5):
        finished(DONE, event_type="a")
    finished(DEAD, event_type="b")
    insert(2, event_type="c")
    assert [each.event_type for each in unrouted_types("default")] == ["c", "b", "a"]


def test_the_look_is_bounded() -> None:
    finished(DONE, event_type="old.done")
    insert(1, event_type="old.due", due=-500)
    finished(DONE, event_type="old.done")
    insert(3, event_type="new", due=60)
    found = {each.event_type: each.events for each in unrouted_types("default", limit=3)}
    assert found == {"new": 3, "old.due": 1}  # the newest, and those due first


@pytest.mark.parametrize(
    ("status", "expected"), [(None, 1), (DEAD, 1), (DONE, 0)], ids=["new", "dead", "done"]
)
def test_check_exits_1_for_what_is_not_done_and_has_no_listener(
    status: int | None, expected: int
) -> None:
    if status is None:
        insert(1, event_type="order.lost", due=3600)
    else:
        finished(status, event_type="order.lost")
    assert code() == 0
    assert code("--check") == expected
    if expected:
        with pytest.raises(CommandError, match=r"no listener for order\.lost"):
            run("--check")
    with listening(hear, "order.lost"):
        assert code("--check") == 0


def test_in_writer_only_nobody_is_missing(settings: Any) -> None:
    insert(1, event_type="order.lost")
    settings.OUTBOX = {"MODE": "writer_only"}
    assert unrouted_types("default") == []


def test_no_answer_is_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def down(alias: str) -> Any:
        raise OperationalError("connection refused")

    monkeypatch.setattr("django_outbox.management.commands.outbox_listeners.unrouted_types", down)
    assert code() == 2


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_each_alias_is_looked_into() -> None:
    with transaction.atomic(using="other"):
        outbox.write("order.lost", using="other")
    found = json.loads(run("--format", "json", "--database", "default", "--database", "other"))
    assert [len(rows) for rows in found["missing"].values()] == [0, 1]


def test_each_listener_is_shown_with_its_queue(settings: Any) -> None:
    settings.OUTBOX = {"QUEUES": {"hooks": {}}}
    with listening(hear, "order.placed", queue="hooks"), listening(hear_later, "x"):
        assert [each["queue"] for each in describe_listeners()] == ["hooks", "default"]
        lines = run().splitlines()
    assert lines[0].split()[:7] == "EVENT TYPE AGGREGATE TYPE NAME QUEUE LISTENER".split()
    assert [each.split()[3] for each in lines[1:3]] == ["hooks", "default"]
