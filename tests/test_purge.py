"""At which ages events go."""

from __future__ import annotations

from typing import Any

import pytest

from django_outbox.conf import Settings
from django_outbox.models.retention import ages
from tests.conformance.test_purge import WEEK


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {WEEK}),
        ({"RETENTION_DONE": None}, set()),
        ({"RETENTION_DONE": None, "RETENTION_DEAD": 5}, {5}),
        ({"RETENTION_DONE": 0}, {0, WEEK}),
        ({"RETENTION_DONE": 1, "RETENTION_UNIQUE": None, "RETENTION_DEAD": 3}, {1, 3}),
        ({"MODE": "writer_only", "RETENTION_DONE": 1, "RETENTION_DEAD": 3}, {1}),
        ({"MODE": "writer_only", "RETENTION_DONE": None, "RETENTION_DEAD": 3}, set()),
    ],
    ids=str,
)
def test_the_ages_at_which_events_go(given: dict[str, Any], found: set[float]) -> None:
    assert ages(Settings(**given)) == found
