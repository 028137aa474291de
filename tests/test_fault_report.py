"""The reliability pages: their tables and sums are what the kept lines of runs say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults import kept, report
from tests.faults.mutants import MUTANTS

LINE: kept.Line = {
    "scenario": "kill",
    "title": "Workers are killed",
    "db": "postgres",
    "seed": 1,
    "size": "ci",
    "revision": "abc",
    "made_on": "here",
    "date": "today",
    "faults": {"kill": 3},
    "events": 1200,
    "runs": 1210,
    "repeats": 4,
    "dead": 0,
    **dict.fromkeys(kept.COUNTED, 0),
    "holds": True,
    "figures": [
        {
            "name": "recovery, s",
            "value": 2.5,
            "most": 3,
            "least": None,
            "judged": True,
            "holds": True,
        }
    ],
}


def line(**given: Any) -> kept.Line:
    return {**LINE, **given}


def test_what_is_wrong_is_shown() -> None:
    found = report.shortlist([line(lost=2, holds=False)])
    assert "**2 lost**" in found
    assert "2 lost, 0 stuck." in report.promises([line(lost=2, holds=False)])
    assert "| 3 | 1,200 | 4 | 2 | 0 |" in report.outcome([line(lost=2, holds=False)])
    slow = {"name": "way back, s", "value": 7.25, "most": 3.0, "least": None, "holds": False}
    missed = line(holds=False, figures=[slow])
    assert "**1 of 1 runs missed a target: kill on PostgreSQL.**" in report.promises([missed])
    assert "missed" not in report.promises([line(size="full")])
    found = report.shortlist([missed])
    assert "0 lost, nothing unexplained; **missed: way back, s 7.25, target ≤ 3**" in found
    ended = report.shortlist([line(holds=False, error="AssertionError: no line")])
    assert "**it was not completed**" in ended


def test_soaks_and_runs_without_faults_are_not_in_the_sum_of_the_faults() -> None:
    lines = [
        line(),
        line(scenario="leaks", events=360_000, faults={}),
        line(scenario="bloat", events=900_000, faults={"snapshot": 1}),
        line(scenario="calm", events=500, faults={}),
    ]
    assert "In 1 runs we wrote 1,200 events, and caused 3 faults" in report.promises(lines)
    rows = report.outcome(lines).splitlines()[2:]
    assert rows[0].startswith("| runs with faults | 1 | 3 | 1,200 |")
    assert rows[1].startswith("| runs without faults | 1 | – | 500 |")
    assert rows[2].startswith("| soak runs | 2 | – | 1,260,000 |")


def test_every_fault_of_the_sum_is_in_one_row_of_the_table_of_faults() -> None:
    lines = kept.read(report.KEPT)
    rows = [row.split(" | ")[1:] for row in report.broken(lines).splitlines()[2:]]
    cells = [cell.strip(" |").replace(",", "") for row in rows for cell in row]
    assert sum(int(cell) for cell in cells if cell != "–") == sum(
        map(kept.struck, kept.grouped(lines)[kept.WITH_FAULTS])
    )


@pytest.mark.parametrize("page", report.PAGES, ids=["page", "index", "cluster", "readme"])
def test_the_published_figures_are_those_that_were_kept(page: Any) -> None:
    text, lines = page.read_text(), kept.read(report.KEPT)
    assert report.BLOCK.search(text)
    assert report.filled(text, lines) == text


def test_every_mutant_that_is_published_was_caught() -> None:
    mutants = [each for each in kept.read(report.KEPT) if "mutant" in each]
    assert {each["mutant"] for each in mutants} <= {each.name for each in MUTANTS}
    assert all(each["caught"] for each in mutants)
