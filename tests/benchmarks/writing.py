"""``python -m tests.benchmarks.writing``: a process that writes when told to, for ``writers``.

Each line of standard input is an ``Order`` as JSON; the answer is the number of transactions.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import django


@dataclass(frozen=True, kw_only=True)
class Order:
    """From when (monotonic) and for how many seconds to write, and how."""

    start: float
    seconds: float
    outbox: dict[str, Any]  # the settings
    embedded: bool = False  # with a worker in this process


def main() -> None:
    django.setup()
    for line in sys.stdin:
        print(obey(Order(**json.loads(line))), flush=True)


def obey(order: Order) -> int:
    from django.test import override_settings

    import django_outbox as outbox

    with override_settings(OUTBOX=order.outbox), ExitStack() as stack:
        if order.embedded:
            stack.enter_context(outbox.Worker(purge=False))
        time.sleep(max(0.0, order.start - time.monotonic()))  # all begin at once
        return write_until(order.start + order.seconds)


def write_until(end: float) -> int:
    from django.db import transaction

    import django_outbox as outbox
    from tests.testapp import models

    from .payload import PAYLOAD

    count = 0
    while time.monotonic() < end:
        with transaction.atomic():
            models.Order.objects.create(sku="teapot", quantity=3)
            outbox.write("benchmark.count", PAYLOAD)
        count += 1
    return count


if __name__ == "__main__":
    main()
