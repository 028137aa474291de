"""What README, documentation and classifiers say is supported is what ``tox -m full`` runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from configparser import ConfigParser
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_database

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "supported-versions.md"
SERVERS = {
    "sqlite": "SQLite",
    "postgres15": "PostgreSQL 15",
    "postgres16": "PostgreSQL 16",
    "postgres17": "PostgreSQL 17",
    "postgres": "PostgreSQL 18",
    "mariadb": "MariaDB 10.11",
    "mariadb118": "MariaDB 11.8",
    "mysql": "MySQL 9.7",
}

Run = tuple[str, str, str]  # Python, Django, database


def test_the_page_shows_the_runs_of_the_matrix() -> None:
    rows = r"^\| (3\.\d+) \| (\d\.\d) \| (.+) \|$"
    assert re.findall(rows, PAGE.read_text(), re.MULTILINE) == matrix()


def test_the_page_claims_what_is_run() -> None:
    pythons, djangos, databases = columns()
    first = PAGE.read_text().partition("##")[0]
    claimed = dict(re.findall(r"^\| (\w+) \| (\d.*) \|$", first, re.MULTILINE))
    assert claimed["Python"] == f"{pythons[0]} to {pythons[-1]}"
    assert claimed["Django"] == ", ".join(djangos)
    postgres = versions(databases, "PostgreSQL")
    assert claimed["PostgreSQL"].startswith(f"{postgres[0]} to {postgres[-1]}, ")
    for server in ("MySQL", "MariaDB"):
        assert claimed[server].startswith(", ".join([*versions(databases, server), "with"]))


def test_no_version_in_between_is_left_out() -> None:
    pythons, _, databases = columns()
    for found in (pythons, versions(databases, "PostgreSQL")):
        last = [int(each.rpartition(".")[2]) for each in found]
        assert last == list(range(last[0], last[-1] + 1))


def test_the_newest_pythons_meet_sqlite_and_postgresql() -> None:
    for python in columns()[0][-2:]:
        met = {database.split()[0] for each, _, database in matrix() if each == python}
        assert met == {"SQLite", "PostgreSQL"}


def test_classifiers_name_what_is_run() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    pythons, djangos, _ = columns()
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text) == pythons
    assert re.findall(r'"Framework :: Django :: (\d\.\d)"', text) == djangos


def test_readme_names_what_is_run() -> None:
    pythons, djangos, _ = columns()
    line = f"Python {pythons[0]} to {pythons[-1]}, Django {djangos[0]} to {djangos[-1]}"
    assert line in (ROOT / "README.md").read_text()


def matrix() -> list[Run]:
    """Return the environments of the label ``full``."""
    parser = ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini")
    label = parser["tox"]["labels"].partition("full =")[2]
    return [run(*each.split("-")) for each in re.findall(r"[\w-]+", label)]


def run(python: str, django: str, database: str) -> Run:
    version, release = python.removeprefix("py"), django.removeprefix("django")
    return f"{version[0]}.{version[1:]}", f"{release[0]}.{release[1:]}", SERVERS[database]


def columns() -> tuple[list[str], list[str], list[str]]:
    """Return each Python, Django and database once, the oldest first."""
    pythons, djangos, databases = zip(*matrix(), strict=True)
    return ascending(pythons), ascending(djangos), [*dict.fromkeys(databases)]


def versions(databases: Iterable[str], server: str) -> list[str]:
    return ascending(each.split()[1] for each in databases if each.startswith(f"{server} "))


def ascending(found: Iterable[str]) -> list[str]:
    return sorted({*found}, key=lambda each: [int(part) for part in each.split(".")])
