"""Rules about the pages: the index, README and llms.txt, workflows."""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterator
from pathlib import Path

from django.core.management import get_commands

import django_outbox as outbox
from tests.rules import Rule, Text, markdown

TOP = ("README.md", "llms.txt")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def index_links_every_page_once(root: Path) -> Iterator[str]:
    """The links of the index are also the navigation of the site."""
    docs, index = root / "docs", Text.read(root, "docs/index.md")
    linked = [*index.names(r"^- \[[^]]+\]\(([a-z/-]+\.md)\)")]
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - {"index.md"}
    names = [name for _, name in linked]
    for name in sorted(pages - {*names}):
        yield index.fault(0, f"no link to {name}; add it to a list")
    for position, name in linked:
        if name not in pages:
            yield index.fault(position, f"{name} does not exist; remove the link")
        elif names.count(name) > 1:
            yield index.fault(position, f"{name} is linked twice; keep one")


# --- README and llms.txt -------------------------------------------------------------------------


def links_lead_to_files(root: Path) -> Iterator[str]:
    """A link is relative, or begins with the address that pyproject.toml has."""
    place = address(root)
    for name in TOP:
        text = Text.read(root, name)
        links = [*text.names(LINK.pattern)]
        for position, link in links:
            path = link.removeprefix(place).partition("#")[0]
            if "://" not in path and path and not (root / path).is_file():
                yield text.fault(position, f"{path} is not a file of the repository; correct it")
            if name == "llms.txt" and not link.startswith(place):
                yield text.fault(position, f"{link} is not absolute; begin it with {place}")
        if all("://" in link.removeprefix(place) for _, link in links):
            yield text.fault(0, "no link to a file of the repository; add one")


def address(root: Path) -> str:
    """Return where the repository's files are shown; empty until pyproject.toml names a place."""
    urls = (
        (root / "pyproject.toml").read_text().partition("[project.urls]\n")[2].partition("\n[")[0]
    )
    found = re.search(r'^Repository = "(https://[^"]+?)/?"$', urls, re.MULTILINE)
    return f"{found[1]}/blob/main/" if found else ""


def the_repository_has_an_address(root: Path) -> Iterator[str]:
    project = Text.read(root, "pyproject.toml")
    start = project.text.find("[project.urls]\n")
    if start >= 0 and not address(root):
        yield project.fault(start, "no Repository, to which links could lead; add it")


def llms_has_the_form_of_its_convention(root: Path) -> Iterator[str]:
    """A title, a summary, ten rules without headings, then sections that are lists of links."""
    text = Text.read(root, "llms.txt")
    before, *sections = re.split(r"^## ", text.text, flags=re.MULTILINE)
    if not re.match(r"# \S.*\n\n> \S.*\n\n", before):
        yield text.fault(0, "does not begin with a title and a summary; see llmstxt.org")
    prose = re.sub(r"^```.*?^```$", "", before, flags=re.MULTILINE | re.DOTALL)
    if len(re.findall(r"^#", prose, re.MULTILINE)) != 1:
        yield text.fault(0, "a heading before the first section; only a title may be there")
    numbers = [int(number) for number in re.findall(r"^(\d+)\. \*\*", before, re.MULTILINE)]
    if numbers != [*range(1, 11)]:
        yield text.fault(0, f"the rules are {numbers}; number them 1 to 10")
    if not sections or not sections[-1].startswith("Optional\n"):
        yield text.fault(len(text.text), "the last section is not Optional; move it to the end")
    position = len(before)
    for section in sections:
        for line in section.splitlines(keepends=True)[1:]:
            if line.strip() and not re.fullmatch(r"- \[[^\]]+\]\([^)\s]+\): \S.*", line.strip()):
                place = text.text.find(line, position)
                yield text.fault(place, "a section is a list of links; write - [name](link): text")
        position += len("## ") + len(section)


def llms_has_the_rules_of_the_page(root: Path) -> Iterator[str]:
    llms, page = (Text.read(root, name) for name in ("llms.txt", "docs/tutorial/ten-rules.md"))
    rules = re.compile(r"^1\. \*\*.*?(?=^[|`])", re.MULTILINE | re.DOTALL)
    found, wanted = (rules.search(each.text) for each in (llms, page))
    if not found or not wanted or found[0] != wanted[0]:
        yield llms.fault(found.start() if found else 0, f"not the rules of {page.path}; copy them")


def one_page_says_how_to_install(root: Path) -> Iterator[str]:
    """What changes with the first release is in one place."""
    place = "docs/reference/supported-versions.md"
    for path in (*TOP, *(each.path for each in markdown(root))):
        text = Text.read(root, path)
        for found in re.finditer(r"on PyPI\s+yet", text.text):
            if path != place:
                yield text.fault(found.start(), f"{place} says this; link to its chapter Install")


def names_exist(root: Path) -> Iterator[str]:
    """Every name of the package and every command that README and llms.txt use exists."""
    for page in TOP:
        text = Text.read(root, page)
        names = [*text.names(r"(?<![-\w])outbox\.(\w+)")]
        commands = [*text.names(r"manage\.py (\w+)")]
        for position, name in names:
            if name not in outbox.__all__:
                yield text.fault(position, f"outbox.{name} does not exist; correct it")
        for position, name in commands:
            if name not in get_commands():
                yield text.fault(position, f"manage.py has no {name}; correct it")
        if not names or "outbox_worker" not in {name for _, name in commands}:
            yield text.fault(0, "does not write an event or run outbox_worker; show both")


# --- workflows -----------------------------------------------------------------------------------


def workflows_run_what_tox_has(root: Path) -> Iterator[str]:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(root / "tox.ini")
    known = {section.partition("testenv:")[2] for section in tox.sections()}
    for _, names in Text.read(root, "tox.ini").names(r"^ +([\w,]+): OUTBOX_TEST_DB = "):
        known |= {*names.split(",")}
    for name in ("tests", "release"):
        workflow = Text.read(root, f".github/workflows/{name}.yml")
        asked = [*workflow.names(r"\btox -e ([\w,]+)$")]
        for position, names in asked:
            for each in {*names.split(",")} - known:
                yield workflow.fault(position, f"tox.ini has no environment {each}; correct it")
        if not asked:
            yield workflow.fault(0, "runs no environment of tox; does the rule still read it?")


RULES: list[Rule] = [
    index_links_every_page_once,
    links_lead_to_files,
    the_repository_has_an_address,
    llms_has_the_form_of_its_convention,
    llms_has_the_rules_of_the_page,
    one_page_says_how_to_install,
    names_exist,
    workflows_run_what_tox_has,
]
