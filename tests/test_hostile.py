"""Rows that somebody damaged, and headers that are too large."""

from __future__ import annotations

import pytest
from django.db import transaction
from django.test.utils import override_settings

import django_outbox as outbox
from django_outbox import write
from django_outbox.exceptions import PayloadTooLarge
from tests.table import PLACED, insert, listening, row, statuses
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


DAMAGED: list[dict[str, str]] = [
    {"payload": text}
    for text in ("", "{", '{"a":', "nul", "NaN", '{"a":1}}', "\u2028", "[" * 5000, "1e", "'a'")
] + [{"headers": text} for text in ("{", "[]", "1", '{"a":1}', '{"a":null}', '"a"', "[" * 5000)]


def test_j18_402_rows_damaged_by_hand_stop_no_batch_and_can_be_repaired() -> None:
    good = [insert(3) for _ in DAMAGED]
    bad = [insert(1, **columns)[0] for columns in DAMAGED]
    with listening(lambda event: None):
        outbox.drain()
    assert statuses() == {"DONE": sum(map(len, good)), "DEAD": len(bad)}
    for each, columns in zip(bad, DAMAGED, strict=True):
        kept = row(each)
        assert "PayloadError" in (kept.last_error or "")
        assert {name: getattr(kept, name) for name in columns} == columns


@pytest.mark.parametrize("megabytes", [5, 17, 33])
def test_large_headers_are_refused_before_they_cost_the_transaction(megabytes: int) -> None:
    """MariaDB drops the connection above 16 MB, and the business transaction with it."""
    headers = {"note": "a" * megabytes * 2**20}
    with override_settings(OUTBOX={}), transaction.atomic():
        Order.objects.create(sku="B-7")
        with pytest.raises(PayloadTooLarge, match=r"headers have \d+ bytes; at most 1048576"):
            write(PLACED, {}, headers=headers)
    assert Order.objects.count() == 1
