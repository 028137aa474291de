"""A fixture for tests that run on every database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connection

from django_outbox.sql import dialect_of


@pytest.fixture(autouse=True)
def no_lock_wait_remembered() -> Iterator[None]:
    """Forget a lock wait: for five minutes after one, claims on MySQL are another statement."""
    yield
    if connection.vendor == "mysql":
        dialect_of(connection)._skips_until = 0.0  # type: ignore[attr-defined]
