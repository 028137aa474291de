"""``outbox_status --listeners``: the registered listeners, and stored events that have none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
from django.core.checks import Tags, run_checks
from django.db import OperationalError, transaction

import django_outbox as outbox
from django_outbox.inspection.listeners import (
    describe_listeners,
    different_listeners,
    live_registries,
    without_listener,
)
from django_outbox.listeners import callables, registry
from django_outbox.listeners.outcomes import Status
from django_outbox.listeners.queues import published
from django_outbox.models import OutboxEvent, OutboxWorker
from tests.table import insert, listening, now
from tests.test_status import fails
from tests.test_status import run as run_status
from tests.waiting import wait_until

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
    assert lines[1].split()[:7] == "EVENT TYPE AGGREGATE TYPE NAME QUEUE LISTENER".split()
    assert [each.split()[3] for each in lines[2:4]] == ["default", "hooks"]


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
    lost = {"event_type": "order.lost", "aggregate_type": "__GLOBAL__", "listener": None}
    [missing] = found["databases"]["default"]["without_listener"]
    assert missing == {**lost, "events": 3, "unsettled": 2, "is_here": False}


def test_routes_are_those_of_the_worker() -> None:
    insert(1, event_type="order.placed", aggregate_type="shop.Order")
    insert(1, event_type="order.placed", aggregate_type="shop.Cart")
    insert(1, event_type="parcel.sent")
    with listening(hear, "order.placed", aggregate_type="shop.Order"), listening(hear, "parcel.*"):
        [found] = without_listener("default", [])
    assert (found["event_type"], found["aggregate_type"]) == ("order.placed", "shop.Cart")


def test_the_worst_comes_first() -> None:
    for _ in range(5):
        finished(DONE, event_type="a")
    finished(DEAD, event_type="b")
    insert(2, event_type="c")
    assert [each["event_type"] for each in without_listener("default", [])] == ["c", "b", "a"]


def test_the_look_is_bounded() -> None:
    finished(DONE, event_type="old.done")
    insert(1, event_type="old.due", due=-500)
    finished(DONE, event_type="old.done")
    insert(3, event_type="new", due=60)
    found = {
        each["event_type"]: each["events"] for each in without_listener("default", [], limit=3)
    }
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


MAIL, SMS, POST = "order.placed mail", "order.placed sms", "order.placed post"


@contextmanager
def known_here(*titles: str) -> Iterator[None]:
    with ExitStack() as stack:
        for title in titles:
            event_type, _, name = title.partition(" ")
            stack.enter_context(listening(lambda event: None, event_type, name=name))
        yield


def show_worker(name: str, *titles: str, age: float = 0, **info: Any) -> None:
    """Show a worker that has these listeners."""
    seen = now() - timedelta(seconds=age)
    with patch.dict(registry._listeners, clear=True), known_here(*titles):
        text = json.dumps({**published(), **info})
    values = {"hostname": "web-1", "pid": 1, "started_at": seen, "heartbeat_at": seen}
    OutboxWorker.objects.create(id=name, info=text, **values)


def test_workers_publish_their_listeners() -> None:
    with known_here(MAIL), listening(hear, "order.placed", formerly=[SMS]), outbox.Worker():
        row = wait_until(OutboxWorker.objects.first, what="its row")
        shown = json.loads(row.info or "")
        assert (shown["listeners"], shown["formerly"]) == (["order.placed", MAIL], [SMS])
        assert shown["registry"] == published()["registry"]
    assert shown["registry"] != published()["registry"]


def test_what_waits_for_a_listener_that_is_not_here_or_in_no_worker_is_found() -> None:
    insert(2, event_type="order.placed", listener=MAIL)
    insert(1, event_type="order.placed", listener=SMS)
    finished(DONE, event_type="order.placed", listener=POST)
    with known_here(MAIL):
        assert fails("--listeners", "--check") == (1, f"no listener for {SMS}")
        assert POST not in run()  # what has ended needs no listener
        show_worker("old", SMS, POST)
        show_worker("lost", MAIL, age=3600)
        said = f"no listener for {SMS}\nno live worker has {MAIL}"
        assert fails("--listeners", "--check") == (1, said)
        show_worker("new", POST, formerly=[MAIL])
        assert fails("--listeners", "--check") == (1, f"no listener for {SMS}")
        OutboxEvent.objects.filter(listener=SMS).delete()
        run("--check")
        OutboxWorker.objects.filter(pk="new").delete()
        OutboxEvent.objects.filter(listener=MAIL).update(
            status=DEAD, available_at=None
        )  # waits for a person
        run("--check")


def test_listeners_that_not_all_workers_have_are_named_with_these() -> None:
    show_worker("one", MAIL, SMS)
    show_worker("two", MAIL, POST)
    show_worker("lost", age=3600)
    OutboxWorker.objects.create(
        id="silent", hostname="h", pid=1, started_at=now(), heartbeat_at=now()
    )
    with known_here(MAIL, "order.sent"):
        found = json.loads(run("--format", "json"))["databases"]["default"]["different_listeners"]
        assert [*SMS.split(), "-", "one", "two"] in [line.split() for line in run().splitlines()]
    assert [[*each.values()] for each in found] == [
        [POST, False, ["two"], ["one"]],
        [SMS, False, ["one"], ["two"]],
        ["order.sent", True, [], ["one", "two"]],
    ]
    OutboxWorker.objects.filter(pk="two").delete()
    with known_here(SMS, MAIL):
        assert different_listeners(live_registries("default")) == []
        OutboxWorker.objects.all().delete()
        assert different_listeners(live_registries("default")) == []


def differing() -> list[str]:
    found = run_checks(tags=[Tags.database], databases=["default"])
    return [each.msg for each in found if each.id == "django_outbox.W058"]


def test_w058_workers_with_other_listeners(settings: Any) -> None:
    show_worker("one", MAIL, SMS)
    with known_here(MAIL, SMS):
        assert differing() == []
    with known_here(MAIL, POST):
        [said] = differing()
        assert (repr(POST) in said, repr(SMS) in said, repr(MAIL) in said) == (True, True, False)
        settings.OUTBOX = {"MODE": "writer_only"}
        assert differing() == []


def test_w059_more_than_five_listeners_of_a_type() -> None:
    def costly() -> list[str]:
        return [each.msg for each in run_checks() if each.id == "django_outbox.W059"]

    with known_here("a", "a b", "a c", "* d", "* e", "other f"):
        assert costly() == []
        with listening(hear, "a", aggregate_type="shop.Order", name="g"):
            [said] = costly()
    assert "'a' (6)" in said
    assert "other" not in said


def test_in_writer_only_nobody_is_missing(settings: Any) -> None:
    insert(1, event_type="order.lost")
    settings.OUTBOX = {"MODE": "writer_only"}
    assert without_listener("default", []) == []


def test_no_answer_is_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def down(alias: str) -> Any:
        raise OperationalError("connection refused")

    monkeypatch.setattr("django_outbox.management.commands.outbox_status.live_registries", down)
    assert fails("--listeners") == (2, "default: connection refused")


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_each_alias_is_looked_into() -> None:
    with transaction.atomic(using="other"):
        outbox.write("order.lost", using="other")
    found = json.loads(run("--format", "json", "--database", "default", "--database", "other"))
    assert [len(each["without_listener"]) for each in found["databases"].values()] == [0, 1]
