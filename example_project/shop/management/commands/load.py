"""``manage.py load``: place many orders, and show how fast the worker delivers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from django_outbox.models import OutboxEvent
from example_project.shop.models import Product
from example_project.shop.ordering import place

INTERVAL = 0.5  # seconds between two counts of what is left


class Command(BaseCommand):
    help = "Place orders from several threads; with --wait also wait until a worker has delivered."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--orders", type=int, default=1000, help="how many (1000)")
        parser.add_argument("--writers", type=int, default=4, help="threads that place them (4)")
        says = "wait that long for everything to be delivered or dead"
        parser.add_argument("--wait", type=float, default=0, metavar="SECONDS", help=says)

    def handle(self, *args: Any, **options: Any) -> None:
        orders, writers = options["orders"], options["writers"]
        Product.objects.update(stock=orders + 1_000_000)
        products = [*Product.objects.exclude(sku="spirit-burner")]  # which the courier refuses
        if not products:
            raise CommandError("The shelves are empty; run manage.py seed first.")
        started = time.monotonic()
        with ThreadPoolExecutor(writers) as pool:
            shares = [range(each, orders, writers) for each in range(writers)]
            placed = sum(pool.map(lambda share: self.order(share, products), shares))
        rate = placed / (time.monotonic() - started)
        self.stdout.write(
            f"{placed} orders placed, {3 * placed} events written: {rate:.0f} orders/s"
        )
        if options["wait"]:
            self.wait(options["wait"])

    def order(self, share: Sequence[int], products: Sequence[Product]) -> int:
        try:
            for number in share:
                place(f"Customer {number}", {products[number % len(products)]: 1})
            return len(share)
        finally:
            connections.close_all()

    def wait(self, seconds: float) -> None:
        deadline, before = time.monotonic() + seconds, None
        while left := OutboxEvent.objects.pending().count():
            if time.monotonic() > deadline:
                raise CommandError(
                    f"{left} events are left after {seconds:g} s; does a worker run?"
                )
            if before is not None:
                self.stdout.write(f"{left} left, {(before - left) / INTERVAL:.0f} events/s")
            before = left
            time.sleep(INTERVAL)
        counts = OutboxEvent.objects.counts_by_status()
        self.stdout.write(f"delivered {counts['DONE']}, dead {counts['DEAD']}")
