"""The steps of the demonstration: order, wait, repair, replay, stop the worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from django.db import transaction
from django.db.models import Sum
from django.db.models.signals import post_save
from django.urls import reverse
from django.utils import timezone

from django_outbox.models import OutboxEvent
from example_project.demo.browser import Visitor
from example_project.demo.verdict import Facts, judge, print_table
from example_project.demo.worker_process import DemoFailed, WorkerProcess
from example_project.partners.models import RefusedGoods
from example_project.shop.models import Order, Product
from example_project.warehouse.models import PickList

ORDERS = 12  # one of them for a spirit burner


def walk(scratch: Path) -> bool:
    """Go through the demonstration, print its table, and say whether all expectations hold."""
    facts = Facts()
    worker = WorkerProcess(scratch / "worker.log")
    try:
        with closing(worker):
            story(facts, worker)
    except DemoFailed as error:
        print(f"\nFAILED: {error}\nThe worker's last words:\n{worker.last_words()}")
        return False
    print_table(facts)
    holds = judge(facts)
    if not holds:
        print(f"\nThe worker's last words:\n{worker.last_words()}")
    return holds


def story(facts: Facts, worker: WorkerProcess) -> None:
    visitor = Visitor()
    wait_for_worker(visitor, facts, worker)
    place_orders(visitor, facts)
    place_impossible_order(visitor, facts)
    dead = wait_for_the_dead(facts, worker)
    replay(visitor, facts, dead)
    took = worker.wait_until(nothing_is_pending, "the replayed event is delivered")
    print(f"5. delivered {took:.1f} s later")
    facts.exit_code = worker.terminate()
    facts.complaints = worker.complaints()[:3]
    print(f"6. the worker got SIGTERM and ended with exit code {facts.exit_code}\n")


def wait_for_worker(visitor: Visitor, facts: Facts, worker: WorkerProcess) -> None:
    """Place one order ahead, so that the latencies do not contain the start of a process."""
    order(visitor, facts, "green-tea", 1)
    took = worker.wait_until(PickList.objects.exists, "the first event reaches its listener")
    print(f"1. a first order; the worker, pid {worker.process.pid}, took it up after {took:.1f} s")


def place_orders(visitor: Visitor, facts: Facts) -> None:
    with commit_times(facts.committed):
        for number in range(ORDERS - 2):
            order(visitor, facts, ("green-tea", "teapot", "cups")[number % 3], 1 + number % 2)
        order(visitor, facts, "spirit-burner", 1)
    print(f"2. {ORDERS - 1} more orders through the shop's page, one for a spirit burner")


def place_impossible_order(visitor: Visitor, facts: Facts) -> None:
    """Order more than there is: found out after the events were written, so they are undone."""
    before = stock()
    page = visitor.fill_in(reverse("shop"), {"customer": "Visitor", "teapot": 99})
    if page.status_code != 422:
        raise DemoFailed(f"99 teapots were answered with status {page.status_code}, not 422.")
    facts.stock_moved_by_refused_order = before - stock()
    print("3. one for 99 teapots: refused, its transaction rolled back together with its events")


def wait_for_the_dead(facts: Facts, worker: WorkerProcess) -> OutboxEvent:
    took = worker.wait_until(nothing_is_pending, "every event is delivered or dead")
    for event in OutboxEvent.objects.all():
        is_dead = event.status == OutboxEvent.Status.DEAD
        facts.died[event.event_type] += is_dead
        facts.retries[event.event_type] += event.attempts - is_dead  # the last one was no retry
    dead = OutboxEvent.objects.dead().first()
    if dead is None:
        raise DemoFailed("No event is dead, though the courier refuses spirit burners.")
    print(f"   after {took:.1f} s all are delivered but {sum(facts.died.values())}:")
    print(f"   {dead.event_type} of order {dead.aggregate_id}: {reason(dead)}")
    return dead


def replay(visitor: Visitor, facts: Facts, dead: OutboxEvent) -> None:
    """Remove the cause, then replay the event; both in the admin, as a person would."""
    visitor.log_in("admin", "admin")
    ban = RefusedGoods.objects.get(sku="spirit-burner")
    visitor.act("partners_refusedgoods", "delete_selected", ban.pk)
    visitor.act("django_outbox_outboxevent", "replay", dead.pk)
    if OutboxEvent.objects.dead().filter(pk=dead.pk).exists():
        raise DemoFailed("The admin's replay has left the event dead.")
    facts.replayed[dead.event_type] += 1
    print("4. the burner struck off the courier's list and the event replayed, both in the admin")


def order(visitor: Visitor, facts: Facts, sku: str, quantity: int) -> None:
    page = visitor.fill_in(reverse("shop"), {"customer": "Visitor", sku: quantity})
    if page.status_code != 302:
        raise DemoFailed(f"An order of {quantity} × {sku} was answered with {page.status_code}.")
    facts.orders += 1


@contextmanager
def commit_times(times: dict[str, datetime]) -> Iterator[None]:
    """Keep the moment of each order's COMMIT, from which its latencies are counted."""

    def note(instance: Order, using: str, **kwargs: Any) -> None:
        transaction.on_commit(
            lambda: times.setdefault(str(instance.pk), timezone.now()), using=using
        )

    post_save.connect(note, sender=Order)
    try:
        yield
    finally:
        post_save.disconnect(note, sender=Order)


def nothing_is_pending() -> bool:
    return not OutboxEvent.objects.pending().exists()


def reason(event: OutboxEvent) -> str:
    """Return the line of the error that names it; the rest is its traceback."""
    return (event.last_error or "no reason given").splitlines()[0]


def stock() -> int:
    return int(Product.objects.aggregate(all=Sum("stock"))["all"])
