"""The benchmarks' own sums, and that the published figures are those of the JSON beside them."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.benchmarks import __main__ as command
from tests.benchmarks import charts, console, report
from tests.benchmarks.figures import Figure, Spread, in_turn, percentile, short
from tests.cases import cases


def figure(**given: Any) -> Figure:
    return Figure(**{"name": "drain", "unit": "events/s", "values": [3.0, 1.0, 2.0], **given})


def test_a_ratio_is_one_of_a_round() -> None:
    assert figure(references=[6.0, 4.0, 2.0]).ratios == [0.5, 0.25, 1.0]


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


@pytest.mark.parametrize(
    ("place", "named", "vendor"),
    [
        ("mysql", "postgres", "mysql"),
        ("postgres://bench@host/name", "mysql", "postgres"),
        ("mysql://bench@host/name", "postgres", "mariadb"),
        ("mysql://bench@host/name", "mysql", "mysql"),
    ],
)
def test_a_database_is_a_name_or_a_url(
    place: str, named: str, vendor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The URL of a MySQL server does not say whether it is MariaDB; ``OUTBOX_TEST_DB`` does."""
    monkeypatch.setenv("OUTBOX_TEST_DB", named)
    found = command.environment(place)
    assert found["OUTBOX_TEST_DB"] == vendor
    assert ("DATABASE_URL" in found) is ("://" in place)


def test_an_unknown_database_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "--on", "oracle://host/name"])
    with pytest.raises(SystemExit):
        command.arguments()
    assert (
        "--on: no such database: oracle://host/name; it is one of these" in capsys.readouterr().err
    )


def test_what_was_not_measured_reaches_nothing() -> None:
    assert figure(values=[], bar="≥ 1", failure="not installed").reached is None


def test_a_spread_is_median_lowest_and_highest() -> None:
    assert Spread.of([5.0, 1.0, 3.0]) == Spread(3.0, 1.0, 5.0)
    assert str(Spread.of([0.5, 1.25, 20.0])) == "1.25 (0.50 to 20.0)"


@cases(
    ("value", "text"),
    [
        (46_123.4, "46,123"),
        (999.6, "1000"),
        (123.4, "123"),
        (12.34, "12.3"),
        (1.234, "1.23"),
        (0.123, "0.12"),
        (0.00123, "0.0012"),
        (0, "0.00"),
    ],
    ids=str,
)
def test_a_number_has_the_digits_that_mean_something(value: float, text: str) -> None:
    assert short(value) == text


@cases(("percent", "expected"), [(50, 50), (99, 99), (100, 100), (0.1, 1)])
def test_a_percentile_is_a_value_that_was_measured(percent: float, expected: float) -> None:
    assert percentile([float(value) for value in range(100, 0, -1)], percent) == expected


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


def test_a_terminal_shows_verdicts_and_what_is_missing() -> None:
    figures = [
        figure(references=[3.0, 1.0, 2.0], reference="the driver", bar="≥ 0.8").as_dict(),
        figure(name="slow", bar="≥ 9").as_dict(),
        figure(name="peer", values=[], failure="not installed").as_dict(),
    ]
    text = console.as_text(result(figures=figures))
    assert "ratio: 1.00 (1.00 to 1.00); target ≥ 0.8: met" in text
    assert "slow: 2.00 (1.00 to 3.00) events/s; target ≥ 9: MISSED" in text
    assert "peer: NOT MEASURED: not installed" in text


def test_a_part_that_failed_is_a_line() -> None:
    failed = {"part": "drain", "database": "sqlite", "seconds": 2.0, "error": "ValueError: no"}
    assert "FAILED: ValueError: no" in console.as_text(failed)


def test_marked_blocks_are_replaced_and_nothing_else() -> None:
    page = "before\n<!-- benchmarks: missed -->\nold\n<!-- end of benchmarks -->\nafter\n"
    found = report.filled(page, run(result(figures=[figure(bar="≥ 9").as_dict()])))
    row = "| SQLite | drain |  | ≥ 9 | 2.00 (1.00 to 3.00) events/s |"
    assert found.startswith("before\n<!-- benchmarks: missed -->\n1 of 1 targets")
    assert found.endswith(f"{row}\n<!-- end of benchmarks -->\nafter\n")
    assert report.filled(found, run()) != found


def test_parts_of_a_run_are_put_together_and_the_latest_counts() -> None:
    first = run(result(seconds=1.0), result("write", seconds=2.0))
    second = run(result(seconds=3.0), result(database="postgres", seconds=4.0))
    assert [each["seconds"] for each in report.merged([first, second])["results"]] == [3, 2, 4]


def test_the_shortlist_has_a_column_for_each_database_that_ran() -> None:
    beside = figure(references=[1.0] * 3, reference="x").as_dict()
    found = [
        result(figures=[figure().as_dict()]),
        result("write", database="mysql"),
        result(database="postgres", figures=[beside]),
    ]
    text = report.shortlist(run(*found))
    assert "|  | PostgreSQL | MySQL | SQLite |" in text
    assert "| drain, compared with x | 2.00 events/s (2.00 ×) |  | 2.00 events/s |" in text


def test_the_shortlist_counts_the_misses() -> None:
    figures = [figure(bar=bar).as_dict() for bar in ("≤ 9", "≥ 9", "")]
    made = run(result(figures=figures))
    assert "1 of 2 targets were missed." in report.shortlist(made)
    row = "| SQLite | drain |  | ≥ 9 | 2.00 (1.00 to 3.00) events/s |"
    assert report.missed(made).splitlines()[0] == "1 of 2 targets were missed."
    assert report.missed(made).splitlines()[4:] == [row]


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


def test_there_is_no_chart_without_peers() -> None:
    missing = figure(
        name="drain, one worker process, compared with x", values=[], failure="no"
    ).as_dict()
    assert charts.rendered([result("peers", "postgres", figures=[missing]), result()]) == {}


def test_the_published_charts_are_those_of_the_kept_run() -> None:
    expected = charts.rendered(json.loads(report.KEPT.read_text())["results"])
    assert expected
    for name, svg in expected.items():
        assert (report.PAGE.parent / f"{name}.svg").read_text() == svg
        assert f"({name}.svg)" in report.PAGE.read_text()


@cases(("load", "told"), [(0.9, False), (1.0, True)])
def test_a_busy_machine_is_told(load: float, told: bool) -> None:
    made = run()
    made["hardware"]["load_before"] = load
    for block in (report.made_on, report.shortlist):
        assert ("busy" in block(made)) is told


@cases("page", report.PAGES, ids=[each.stem for each in report.PAGES])
def test_the_published_figures_are_those_of_the_kept_run(page: Any) -> None:
    text = page.read_text()
    assert report.BLOCK.search(text)
    assert report.filled(text, json.loads(report.KEPT.read_text())) == text
