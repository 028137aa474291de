"""``python -m tests.benchmarks``: a table and one JSON line; the database as for the tests."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from typing import Any

import django


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument("--events", type=int, default=30_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()

    from django.db import connection
    from django.test.utils import setup_databases, teardown_databases

    from . import drain

    made = setup_databases(verbosity=0, interactive=False)
    try:
        report(connection, drain.run(options.events, options.repeats), options.events)
    finally:
        teardown_databases(made, verbosity=0)


def report(connection: Any, figures: dict[str, list[float]], events: int) -> None:
    pairs = zip(figures["worker"], figures["reference"], strict=True)
    ratios = [worker / reference for worker, reference in pairs]
    print(f"drain of {events} events on {connection.vendor}, medians (lowest to highest)")
    for name, rates in figures.items():
        print(f"  {name:<10} {spread(rates, '{:,.0f}')} events/s")
    print(f"  ratio      {spread(ratios, '{:.2f}')}")
    facts = {
        "benchmark": "drain", "vendor": connection.vendor, "events": events, **figures,
        "ratio": statistics.median(ratios), "cpus": os.cpu_count(), "machine": platform.machine(),
        "python": sys.version.split()[0], "django": django.get_version(),
    }  # fmt: skip
    print(json.dumps(facts))


def spread(values: list[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return f"{form.format(statistics.median(values))} ({low} to {high})"


if __name__ == "__main__":
    main()
