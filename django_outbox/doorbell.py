"""Who is rung: news of a commit for workers in other processes; it carries no event."""

from __future__ import annotations

from django.db.backends.base.base import BaseDatabaseWrapper


def ring(connection: BaseDatabaseWrapper) -> None:
    """Wake the workers of this database; never raises, never waits."""
