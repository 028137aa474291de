"""The samples of the README and of llms.txt run, and a release makes their links absolute."""

from __future__ import annotations

import re
import sys
import unittest
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from django.core.management import call_command

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from tests import samples
from tests.absolute_links import absolute
from tests.receiver import receiving
from tests.testapp.models import Order

ROOT = samples.DOCS.parent
LLMS = "../llms.txt"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def test_a_release_makes_the_links_of_the_readme_absolute() -> None:
    """PyPI has none of the files that they lead to."""
    text = (ROOT / "README.md").read_text()
    made = absolute(text, "https://code.example/outbox", "v1")
    assert "](https://code.example/outbox/raw/v1/docs/images/" in made
    links = [link.partition("#")[0] for link in LINK.findall(made)]
    assert [link for link in links if "://" not in link] == []
    files = {re.sub(r"^https://code.example/outbox/(raw|blob)/v1/", "", link) for link in links}
    assert [each for each in files if "://" not in each and not (ROOT / each).is_file()] == []
    assert LINK.sub("", made) == LINK.sub("", text)


@pytest.mark.django_db
def test_511_the_sample_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """It needs nothing but what it shows: no name is given to it."""
    with samples.run("../README.md") as names:
        row = OutboxEvent.objects.get()
        assert (row.event_type, row.status) == ("user.joined", OutboxEvent.Status.DONE)
        assert (row.aggregate_type, row.aggregate_id) == ("auth.User", str(names["user"].pk))
    assert capsys.readouterr().out == f"welcome, ada {row.pk}\n"


@pytest.fixture
def shop(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules of llms.txt, of which the first is the settings."""
    pytest.importorskip("requests")
    models = ModuleType("shop.models")
    vars(models).update(Order=Order)
    # Not patch.dict, which takes away what is imported meanwhile: cryptography cannot come twice.
    monkeypatch.setitem(sys.modules, "shop.models", models)
    with samples.modules(LLMS, INSTALLED_APPS=[]) as made:
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
