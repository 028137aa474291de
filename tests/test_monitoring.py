"""What is shipped for monitoring: the page of metrics, alerts, the dashboard, the how-to."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import psutil
import pytest
import yaml
from django.test import Client, override_settings
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from django_outbox.contrib.prometheus import receivers
from django_outbox.contrib.prometheus.metrics import BACKLOG_GAUGES, COUNTERS, GAUGES, HISTOGRAMS
from tests import samples
from tests.cases import cases
from tests.fleet import REPOSITORY, Fleet, children, wait_until
from tests.table import statuses, write

SHIPPED = Path(receivers.__file__).parent
PAGE = samples.DOCS / "reference" / "metrics.md"

Selector = tuple[str, set[str]]  # a metric, and the labels that a query uses


def declared() -> dict[str, tuple[str, set[str]]]:
    """Return every metric as it is exposed, with its type and labels."""
    groups = (
        (COUNTERS, "counter", "_total"),
        (HISTOGRAMS, "histogram", ""),
        (GAUGES, "gauge", ""),
        (BACKLOG_GAUGES, "gauge", ""),
    )
    return {
        f"outbox_{each.name}{suffix}": (kind, set(each.labels))
        for group, kind, suffix in groups
        for each in group.values()
    }


def series() -> dict[str, set[str]]:
    """Return every name that a query may use, with its labels."""
    found = {}
    for name, (kind, labels) in declared().items():
        if kind == "histogram":
            found |= {f"{name}_{part}": labels for part in ("sum", "count")}
            found[f"{name}_bucket"] = labels | {"le"}
        else:
            found[name] = labels
    return found


# -- the page --------------------------------------------------------------------------------------


def test_428_the_page_tells_every_metric_and_no_other() -> None:
    rows = re.findall(
        r"^\| `(outbox_\w+)` \| (\w+) \| (.*?) \| .+ \|$", PAGE.read_text(), re.MULTILINE
    )
    told = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert told == declared()
    assert len(rows) == len(told)


def test_428_what_is_declared_is_what_is_exposed() -> None:
    registry = CollectorRegistry()
    receivers.Receivers("outbox", registry)
    exposed = {
        f"{each.name}_total" if each.type == "counter" else each.name: each.type
        for each in registry.collect()
    }
    assert exposed == {name: kind for name, (kind, _) in declared().items()}


def test_every_label_is_explained() -> None:
    labels = {label for _, labels in declared().values() for label in labels}
    section = PAGE.read_text().partition("## Labels")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE)) == labels


# -- alerts and dashboard --------------------------------------------------------------------------


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((SHIPPED / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> Iterator[tuple[str, str]]:
    """Yield every query of the dashboard, with the title of its panel."""
    for panel in json.loads((SHIPPED / "dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            # Grafana substitutes its variables before Prometheus parses the query.
            query = target["expr"].replace("$__rate_interval", "5m").replace("$database", ".*")
            yield panel["title"], query


def selectors(query: str) -> list[Selector]:
    """Parse a query; return the metrics it selects, with the labels of their matchers."""
    found: list[Selector] = []

    def walk(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node.name, {each.name for each in node.matchers.matchers}))
        for part in ("lhs", "rhs", "expr", "vector_selector", "args"):
            child = getattr(node, part, None)
            for each in child if isinstance(child, list) else [child]:
                if each is not None:
                    walk(each)

    walk(promql_parser.parse(query))
    return found


def grouped(query: str) -> set[str]:
    return {
        label.strip() for part in re.findall(r"by \(([^)]*)\)", query) for label in part.split(",")
    }


QUERIES = [*((rule["alert"], rule["expr"]) for rule in rules()), *panels()]


@cases("number", range(len(QUERIES)))
def test_a_query_asks_for_metrics_and_labels_that_exist(number: int) -> None:
    known, (_, query) = series(), QUERIES[number]
    asked = selectors(query)
    assert asked
    for name, labels in asked:
        assert name in known, query
        assert labels <= known[name], query
        assert grouped(query) <= known[name], query


def test_every_trouble_has_an_alert_that_says_what_to_do() -> None:
    told = re.findall(r"^\| `(Outbox\w+)` \| .+ \| (yes )?\|$", PAGE.read_text(), re.MULTILINE)
    wakes = [(each["alert"], each["labels"]["severity"] == "critical") for each in rules()]
    assert sorted(wakes) == sorted((name, bool(yes)) for name, yes in told)
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "action"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_the_labels_of_an_alert_are_those_that_its_query_leaves() -> None:
    for rule in rules():
        named = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        assert named <= grouped(rule["expr"]), rule["alert"]


# -- web processes ---------------------------------------------------------------------------------

urlpatterns: list[Any] = []  # filled from the how-to's sample


@pytest.mark.django_db(transaction=True)
def test_432_django_prometheus_shows_them_in_a_web_process() -> None:
    pytest.importorskip("django_prometheus", reason="it caps Django below 6.1")
    with samples.run("reference/metrics.md", only="django_prometheus.urls") as names:
        urlpatterns[:] = names["urlpatterns"]
    installed = receivers.install()
    assert receivers.install() is installed
    try:
        with override_settings(ROOT_URLCONF=__name__):
            write(2, "seen.in.web")
            text = Client().get("/metrics").content.decode()
    finally:
        installed.disconnect()
        receivers._installed = None
    values = {
        (each.name, each.labels.get("event_type")): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }
    assert values["outbox_events_written_total", "other"] == 2
    assert ("outbox_lag_seconds", None) in values


# -- worker processes ------------------------------------------------------------------------------

SCRAPE = """
import django
django.setup()
from prometheus_client import generate_latest
from django_outbox.contrib.prometheus.metrics import registry
from django_outbox.contrib.prometheus.receivers import install
print(generate_latest(registry(install().backlog)).decode())
"""


@pytest.fixture
def fleet(database_env: dict[str, str], tmp_path: Path) -> Iterator[Fleet]:
    (tmp_path / "metrics").mkdir()
    environment = {**database_env, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics")}
    fleet = Fleet(environment, tmp_path, PROBE_INTERVAL=0.05)
    fleet._environment["DJANGO_SETTINGS_MODULE"] = "tests.metrics_settings"
    yield fleet
    fleet.kill_all()


def scrape(fleet: Fleet) -> dict[str, float]:
    """Return what one port shows for all processes, summed by name."""
    done = subprocess.run(
        [sys.executable, "-c", SCRAPE],
        env=fleet._environment,
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(done.stdout):
        for each in family.samples:
            if each.labels.get("database") == "default":
                values[each.name] = values.get(each.name, 0) + each.value
    return values


@pytest.mark.django_db(transaction=True)
def test_432_j25_processes_are_summed_up_and_a_killed_one_leaves_no_gauge(fleet: Fleet) -> None:
    parent = fleet.start("--processes", "2")
    wait_until(lambda: len(fleet.logged("worker started")) == 2, what="two workers")
    write(20, "order.followed")
    wait_until(lambda: statuses() == {"DONE": 20}, what="all delivered")

    def all_settled() -> dict[str, float] | None:
        found = scrape(fleet)
        return found if found.get("outbox_events_settled_total") == 20 else None

    seen = wait_until(all_settled)
    assert seen is not None
    assert seen["outbox_workers_running"] == 2
    assert seen["outbox_workers"] == 2
    assert seen["outbox_lag_seconds"] == 0
    killed = next(each for each in children(psutil.Process(parent.pid)))
    killed.send_signal(signal.SIGKILL)
    wait_until(lambda: len(fleet.logged("worker started")) == 3, what="a third")
    wait_until(lambda: scrape(fleet)["outbox_workers_running"] == 2, what="two that live")
    assert scrape(fleet)["outbox_events_settled_total"] == 20
    assert fleet.end(parent) == 0
    assert "outbox_workers_running" not in scrape(fleet)
