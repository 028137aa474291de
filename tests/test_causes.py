"""Which errors are one cause: normalised texts."""

from __future__ import annotations

import pytest
from django.test import override_settings

from django_outbox.inspection.causes import load_causes
from django_outbox.listeners.history import CAUSE_LENGTH as LENGTH
from django_outbox.listeners.history import error_class, normalised
from tests.cases import cases
from tests.conformance.test_causes import FAILED, OTHERS, REFUSED, SAME
from tests.table import dead

pytestmark = pytest.mark.django_db


@cases("texts", SAME.values(), ids=SAME)
def test_errors_that_differ_in_numbers_and_ids_are_the_same(texts: tuple[str, str]) -> None:
    first, second = map(normalised, texts)
    assert first == second
    assert "#" in first or "\n" in texts[0]


@cases("texts", OTHERS.values(), ids=OTHERS)
def test_errors_that_name_other_things_differ(texts: tuple[str, str]) -> None:
    assert normalised(texts[0]) != normalised(texts[1])


def test_a_normalised_error_is_readable_and_short() -> None:
    assert normalised(FAILED.format(host="a.example", order=17)) == (
        "HTTPError: # Server Error: Service Unavailable for url: https://a.example/orders/#"
    )
    assert "(host='a.example', port=#): Max" in normalised(
        REFUSED.format(host="a.example", order=1)
    )
    assert len(normalised("x" * 1000)) == LENGTH
    assert (normalised(None), error_class(None), error_class("no colon\nx")) == ("", "", "no colon")


def test_a_digest_cannot_be_computed_without_the_secret_key() -> None:
    """Else it would tell by trial what an error hides."""
    dead(1, "ValueError: password=abc")
    first = load_causes("default", limit=1).causes[0].digest
    with override_settings(SECRET_KEY="another"):
        assert load_causes("default", limit=1).causes[0].digest != first
