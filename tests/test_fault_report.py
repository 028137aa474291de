"""The reliability page: what stands there is what the kept lines of runs say."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.faults import report
from tests.faults.mutants import MUTANTS
from tests.faults.scenarios import SCENARIOS

pytestmark = pytest.mark.any_database

LINE: report.Line = {
    "scenario": "kill", "title": "Workers are killed", "db": "postgres", "seed": 1, "size": "ci",
    "revision": "abc", "made_on": "here", "date": "today", "faults": {"kill": 3}, "events": 1200,
    "runs": 1210, "repeats": 4, "dead": 0, **dict.fromkeys(report.COUNTED, 0), "holds": True,
    "figures": [
        {"name": "recovery, s", "value": 2.5, "most": 3, "least": None, "judged": True,
         "holds": True},
    ],
}  # fmt: skip
MUTANT: report.Line = {
    "mutant": "no fence", "without": "a safeguard", "db": "postgres", "scenario": "pause",
    "seed": 1, "caught": True, "by": {"unexplained": 3},
}  # fmt: skip


def line(**given: Any) -> report.Line:
    return {**LINE, **given}


def test_the_latest_of_the_same_counts() -> None:
    first, other, second = line(events=1), line(db="sqlite"), line(events=2)
    assert report.latest([first, other, second, MUTANT]) == [second, other, MUTANT]


def test_a_full_size_counts_more_than_a_small_one() -> None:
    found = report.shortlist([line(size="full", events=100_000), line()])
    assert "100,000 events, 3 × kill: 0 lost" in found
    assert "1,200" not in found


def test_what_is_wrong_is_shown() -> None:
    found = report.shortlist([line(lost=2, holds=False)])
    assert "**2 lost**" in found
    assert "2 lost, 0 ghosts" in found.splitlines()[0]
    assert "**no**" in report.counted([line(lost=2, holds=False)])
    slow = {"name": "way back, s", "value": 7.25, "most": 3.0, "least": None, "holds": False}
    found = report.shortlist([line(holds=False, figures=[slow])])
    assert "**1 of 1 runs missed a bar: kill on PostgreSQL.**" in found.splitlines()[0]
    assert "missed" not in report.shortlist([line(size="full")])
    assert "0 lost, nothing unexplained; **missed: way back, s 7.25, asked ≤ 3**" in found
    ended = report.shortlist([line(holds=False, error="AssertionError: no line")])
    assert "**it did not come to its end**" in ended
    assert "**no**" in report.mutants([{**MUTANT, "caught": False, "by": {}}])


def test_blocks_are_filled_in_and_the_rest_stays() -> None:
    page = "before\n<!-- faults: mutants -->\nold\n<!-- end of faults -->\nafter\n"
    found = report.filled(page, [MUTANT])
    assert found.startswith("before\n<!-- faults: mutants -->\n| the engine with |")
    assert found.endswith("\n<!-- end of faults -->\nafter\n")
    assert "unexplained repeats: 3" in found


@pytest.mark.parametrize("page", [report.PAGE, report.README], ids=["page", "readme"])
def test_the_published_figures_are_those_that_were_kept(page: Any) -> None:
    text, lines = page.read_text(), report.read(report.KEPT)
    assert report.BLOCK.search(text)
    assert report.filled(text, lines) == text


def test_every_mutant_that_is_published_was_caught() -> None:
    mutants = [each for each in report.read(report.KEPT) if "mutant" in each]
    assert {each["mutant"] for each in mutants} <= {each.name for each in MUTANTS}
    assert all(each["caught"] for each in mutants)
    text = report.PAGE.read_text()
    assert [each.name for each in MUTANTS if f"| {each.name} |" not in text] == []


def test_every_scenario_is_listed() -> None:
    found = {each["scenario"] for each in report.runs(report.read(report.KEPT))}
    names = re.findall(r"^- `(\w+)`", report.PAGE.read_text(), re.MULTILINE)
    assert found <= {*SCENARIOS} == {*names}


def test_what_was_not_run_is_listed_without_figures() -> None:
    name, mutant = next(iter(SCENARIOS)), MUTANTS[0].name
    assert re.search(rf"^- `{name}`: .* \({report.NOT_RUN}\)$", report.scenarios([]), re.MULTILINE)
    assert report.NOT_RUN not in report.scenarios([line(scenario=each) for each in SCENARIOS])
    row = next(row for row in report.mutants([]).splitlines() if row.startswith(f"| {mutant} |"))
    assert row.endswith(f"| {report.NOT_RUN} |  |")
