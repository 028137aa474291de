"""What README, documentation and classifiers say is supported is what ``tox -m full`` runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from configparser import ConfigParser
from pathlib import Path

from tests.rules import Rule, Text

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
PAGE = "docs/reference/supported-versions.md"

Run = tuple[str, str, str]  # Python, Django, database


def page_shows_the_runs(root: Path) -> Iterator[str]:
    page = Text.read(root, PAGE)
    found = [*re.finditer(r"^\| (3\.\d+) \| (\d\.\d) \| (.+) \|$", page.text, re.MULTILINE)]
    rows, runs = [each.groups() for each in found], matrix(root)
    if rows != runs:
        wrong = next((row for row in found if row.groups() not in runs), None)
        lost = ", ".join(" ".join(run) for run in runs if run not in rows) or "none"
        place = (wrong or found[0]).start() if found else 0
        yield page.fault(place, f"not the runs of tox.ini; missing: {lost}; copy label full")


def page_claims_what_is_run(root: Path) -> Iterator[str]:
    page = Text.read(root, PAGE)
    pythons, djangos, databases = columns(root)
    postgres = versions(databases, "PostgreSQL")
    wanted = {
        "Python": f"{pythons[0]} to {pythons[-1]}",
        "Django": ", ".join(djangos),
        "PostgreSQL": f"{postgres[0]} to {postgres[-1]}, ",
        **{
            server: ", ".join([*versions(databases, server), "with"])
            for server in ("MySQL", "MariaDB")
        },
    }
    for name, value in wanted.items():
        row = re.search(rf"^\| {name} \| (\d.*) \|$", page.text, re.MULTILINE)
        whole = name in ("Python", "Django")
        if row is None or not (row[1] == value if whole else row[1].startswith(value)):
            yield page.fault(row.start() if row else 0, f"{name}: tox.ini runs {value!r}; say so")


def no_version_is_left_out(root: Path) -> Iterator[str]:
    """No Python and no PostgreSQL in between; the two newest Pythons meet both databases."""
    pythons, _, databases = columns(root)
    for found in (pythons, versions(databases, "PostgreSQL")):
        last = [int(each.rpartition(".")[2]) for each in found]
        if last != [*range(last[0], last[-1] + 1)]:
            yield tox(root).fault(0, f"a version is missing in {found}; add it to label full")
    for python in pythons[-2:]:
        met = {database.split()[0] for each, _, database in matrix(root) if each == python}
        if met != {"SQLite", "PostgreSQL"}:
            yield tox(root).fault(0, f"Python {python} needs SQLite and PostgreSQL in label full")


def classifiers_name_what_is_run(root: Path) -> Iterator[str]:
    project = Text.read(root, "pyproject.toml")
    pythons, djangos, _ = columns(root)
    for pattern, runs in (
        (r'"Programming Language :: Python :: (3\.\d+)"', pythons),
        (r'"Framework :: Django :: (\d\.\d)"', djangos),
    ):
        found = [*project.names(pattern)]
        if [name for _, name in found] != runs:
            place = found[0][0] if found else 0
            yield project.fault(place, f"the classifiers are not those of tox.ini: {runs}")


def readme_names_what_is_run(root: Path) -> Iterator[str]:
    readme = Text.read(root, "README.md")
    pythons, djangos, _ = columns(root)
    line = f"Python {pythons[0]} to {pythons[-1]}, Django {djangos[0]} to {djangos[-1]}"
    if line not in readme.text:
        yield readme.fault(max(0, readme.text.find("Python 3")), f"not what tox.ini runs: {line!r}")


RULES: list[Rule] = [
    page_shows_the_runs,
    page_claims_what_is_run,
    no_version_is_left_out,
    classifiers_name_what_is_run,
    readme_names_what_is_run,
]


def tox(root: Path) -> Text:
    return Text.read(root, "tox.ini")


def matrix(root: Path) -> list[Run]:
    """Return the environments of the label ``full``."""
    parser = ConfigParser(interpolation=None)
    parser.read_string(tox(root).text)
    label = parser["tox"]["labels"].partition("full =")[2]
    return [run(*each.split("-")) for each in re.findall(r"[\w-]+", label)]


def run(python: str, django: str, database: str) -> Run:
    version, release = python.removeprefix("py"), django.removeprefix("django")
    return f"{version[0]}.{version[1:]}", f"{release[0]}.{release[1:]}", SERVERS[database]


def columns(root: Path) -> tuple[list[str], list[str], list[str]]:
    """Return each Python, Django and database once, the oldest first."""
    pythons, djangos, databases = zip(*matrix(root), strict=True)
    return ascending(pythons), ascending(djangos), [*dict.fromkeys(databases)]


def versions(databases: Iterable[str], server: str) -> list[str]:
    return ascending(each.split()[1] for each in databases if each.startswith(f"{server} "))


def ascending(found: Iterable[str]) -> list[str]:
    return sorted({*found}, key=lambda each: [int(part) for part in each.split(".")])
