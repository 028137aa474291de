"""The benchmarks' own sums, and that the published figures are those of the JSON beside them."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree as ET

from tests.benchmarks import charts, report
from tests.benchmarks.figures import Figure, in_turn
from tests.cases import cases


def figure(**given: Any) -> Figure:
    return Figure(**{"name": "drain", "unit": "events/s", "values": [3.0, 1.0, 2.0], **given})


@cases(
    ("bar", "references", "reached"),
    [
        ("≥ 0.5", [6.0, 2.0, 2.0], True),
        ("≥ 0.6", [6.0, 2.0, 2.0], False),
        ("≤ 0.5", [6.0, 2.0, 2.0], True),
        ("≤ 0.4", [6.0, 2.0, 2.0], False),
        ("≤ 2", [], True),
        ("≥ 2.1", [], False),
        ("", [], None),
    ],
)
def test_the_median_is_judged(bar: str, references: list[float], reached: bool | None) -> None:
    """By the ratio where there is a reference, else by the value."""
    assert figure(bar=bar, references=references).reached is reached


def test_all_are_measured_in_turn_and_every_other_round_backwards() -> None:
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = in_turn({"a": lambda: measure("a"), "b": lambda: measure("b")}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}


# --- a run as text ------------------------------------------------------------------------------


def run(*results: dict[str, Any]) -> report.Run:
    return {
        "hardware": {
            "cpu": "Abacus",
            "cores": 2,
            "memory_gb": 4,
            "system": "Linux 6",
            "load_before": 0.1,
        },
        "software": {"python": "3.12.1", "django": "6.1", "revision": "abc", "date": "today"},
        "scale": {"repeats": 3},
        "results": list(results),
    }


def result(part: str = "drain", database: str = "sqlite", **given: Any) -> dict[str, Any]:
    server = {"name": "SQLite 3", "driver": "sqlite3", "journal_mode": "wal"}
    return {"part": part, "database": database, "seconds": 1.5, "server": server, **given}


# --- charts -------------------------------------------------------------------------------------


def beside(peer: str, ours: float, theirs: float) -> dict[str, Any]:
    name = f"drain, one worker process, compared with {peer}"
    return figure(name=name, values=[ours], references=[theirs], reference=peer).as_dict()


def test_a_chart_has_a_bar_for_us_and_each_peer_on_one_scale() -> None:
    peers = [beside("slow & old", 400.0, 100.0), beside("fast", 400.0, 200.0)]
    (svg,) = charts.rendered([result("peers", "postgres", figures=peers)]).values()
    root = ET.fromstring(svg)
    space = {"svg": "http://www.w3.org/2000/svg"}
    widths = [float(each.get("width", "")) for each in root.findall("svg:rect", space)]
    assert widths == [400.0, 100.0, 200.0]
    texts = [each.text for each in root.findall("svg:text", space)]
    assert {"django_outbox", "slow & old", "fast", "400 events/s", "100 events/s"} <= {*texts}


def test_the_published_charts_are_those_of_the_kept_run() -> None:
    expected = charts.rendered(json.loads(report.KEPT.read_text())["results"])
    assert expected
    for name, svg in expected.items():
        assert (report.PAGE.parent / f"{name}.svg").read_text() == svg
        assert f"({name}.svg)" in report.PAGE.read_text()


@cases("page", report.PAGES, ids=[each.stem for each in report.PAGES])
def test_the_published_figures_are_those_of_the_kept_run(page: Any) -> None:
    text = page.read_text()
    assert report.BLOCK.search(text)
    assert report.filled(text, json.loads(report.KEPT.read_text())) == text
