"""The pages outside the documentation: the README's sample and links, and the whole of llms.txt."""

from __future__ import annotations

import re
import sys
import unittest
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
from django.core.management import call_command, get_commands

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from tests import samples
from tests.absolute_links import absolute
from tests.receiver import receiving
from tests.testapp.models import Order

ROOT = samples.DOCS.parent
LLMS = "../llms.txt"
PAGES = ("README.md", "llms.txt")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


# --- links ---------------------------------------------------------------------------------------


def address() -> str:
    """Return where the repository's files are shown; empty until pyproject.toml names a place."""
    text = (ROOT / "pyproject.toml").read_text()
    urls = text.partition("[project.urls]\n")[2].partition("\n[")[0]
    found = re.search(r'^Repository = "(https://[^"]+?)/?"$', urls, re.MULTILINE)
    assert bool(found) is bool(urls), "[project.urls] has no Repository, to which links could lead"
    return f"{found[1]}/blob/main/" if found else ""


def broken(text: str, place: str) -> list[str]:
    """Return the links to files of the repository that lead to none; ``place`` is its address."""
    links = [link.removeprefix(place) for link in LINK.findall(text)]
    paths = [link.partition("#")[0] for link in links if "://" not in link]
    assert paths, "no link to any file"
    return [path for path in paths if path and not (ROOT / path).is_file()]


@pytest.mark.any_database
@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_of_the_repository(page: str) -> None:
    assert broken((ROOT / page).read_text(), address()) == []


@pytest.mark.any_database
def test_links_to_nothing_are_found() -> None:
    place = "https://code.example/outbox/blob/main/"
    text = f"[a](README.md#x) [b](docs/none.md) [c]({place}docs/index.md) [d]({place}none)"
    assert broken(text, place) == ["docs/none.md", "none"]


@pytest.mark.any_database
def test_llms_links_are_absolute_where_the_repository_has_an_address() -> None:
    """An assistant may read the file without the repository around it."""
    links = LINK.findall((ROOT / "llms.txt").read_text())
    assert [link for link in links if not link.startswith(address())] == []


@pytest.mark.any_database
def test_a_release_makes_the_links_of_the_readme_absolute() -> None:
    """PyPI has none of the files that they lead to."""
    text = (ROOT / "README.md").read_text()
    made = absolute(text, "https://code.example/outbox", "v1")
    assert "](https://code.example/outbox/raw/v1/docs/images/" in made
    assert [link for link in LINK.findall(made) if "://" not in link] == []
    assert (
        broken(made.replace("/raw/v1/", "/blob/v1/"), "https://code.example/outbox/blob/v1/") == []
    )
    assert LINK.sub("", made) == LINK.sub("", text)


# --- the form of llms.txt (llmstxt.org), and its names -------------------------------------------


def parts() -> tuple[str, list[str]]:
    """Return what comes before the first section, and the sections."""
    before, *sections = re.split(r"^## ", (ROOT / "llms.txt").read_text(), flags=re.MULTILINE)
    return before, sections


@pytest.mark.any_database
def test_the_form_is_that_of_the_convention() -> None:
    """A title, a summary, details without headings, then sections that are lists of links."""
    before, sections = parts()
    assert re.match(r"# \S.*\n\n> \S.*\n\n", before)
    prose = re.sub(r"^```.*?^```$", "", before, flags=re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"^#", prose, re.MULTILINE)) == 1
    assert sections[-1].startswith("Optional\n")  # what may be left out
    for section in sections:
        _, *lines = section.strip().splitlines()
        for line in filter(None, lines):
            assert re.fullmatch(r"- \[[^\]]+\]\([^)\s]+\): \S.*", line)


@pytest.mark.any_database
def test_there_are_ten_rules() -> None:
    numbers = re.findall(r"^(\d+)\. \*\*", parts()[0], re.MULTILINE)
    assert [int(number) for number in numbers] == [*range(1, 11)]


@pytest.mark.any_database
@pytest.mark.parametrize("page", PAGES)
def test_every_name_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    names = {*re.findall(r"(?<![-\w])outbox\.(\w+)", text)}
    assert names
    assert names <= {*outbox.__all__}
    commands = {*re.findall(r"manage\.py (\w+)", text)}
    assert "outbox_worker" in commands
    assert commands <= {*get_commands()}


# --- the samples ---------------------------------------------------------------------------------


@pytest.mark.django_db
def test_511_the_sample_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """It needs nothing but what it shows: no name is given to it."""
    with samples.run("../README.md") as names:
        row = OutboxEvent.objects.get()
        assert (row.event_type, row.status) == ("user.joined", OutboxEvent.Status.DONE)
        assert (row.aggregate_type, row.aggregate_id) == ("auth.User", str(names["user"].pk))
    assert capsys.readouterr().out == f"welcome, ada {row.pk}\n"


@pytest.fixture
def shop(settings: Any) -> Iterator[dict[str, ModuleType]]:
    """The modules of llms.txt, of which the first is the settings."""
    pytest.importorskip("requests")
    models = ModuleType("shop.models")
    vars(models).update(Order=Order)
    with (
        patch.dict(sys.modules, {"shop.models": models}),
        samples.modules(LLMS, INSTALLED_APPS=[]) as made,
    ):
        settings.OUTBOX = made["settings"].OUTBOX
        settings.PARTNER_URL = made["settings"].PARTNER_URL
        yield made


@pytest.mark.django_db
def test_every_block_of_llms_is_a_file_and_runs(shop: dict[str, ModuleType]) -> None:
    text = (ROOT / "llms.txt").read_text()
    assert text.count("```") == 2 * len(samples.blocks(LLMS)) == 2 * len(shop)
    assert shop["settings"].INSTALLED_APPS == ["django_outbox"]
    call_command("check", fail_level="WARNING", tags=["django_outbox"])
    case = shop["shop.tests"].OrderTests
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert (result.testsRun, result.errors, result.failures) == (1, [], [])


@pytest.mark.django_db
def test_the_listener_of_llms_calls_the_partner(shop: dict[str, ModuleType], settings: Any) -> None:
    """A request with the event's id; 503 is retried, 400 is not."""
    status = OutboxEvent.Status
    with receiving() as partner:
        settings.PARTNER_URL = partner.url
        for answer, expected in ((200, status.DONE), (503, status.RETRY), (400, status.DEAD)):
            partner.answer = lambda path, body, answer=answer: (answer, {}, b"no teapots")
            order = shop["shop.orders"].place_order("teapot")
            outbox.drain()
            row = OutboxEvent.objects.get(aggregate_id=str(order.pk))
            assert (row.status, row.key) == (expected, f"order:{order.pk}")
            _, headers, body = partner.received[-1]
            assert headers["idempotency-key"] == row.pk
            assert body.replace(b" ", b"") == row.payload.encode()
    assert "Unrecoverable: no teapots" in (row.last_error or "")
