"""Transactions of a given connection; ``atomic()`` finds a connection by its alias."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper


@contextmanager
def single_transaction(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Run the block in a transaction of this connection, unless one is open.

    ``atomic()`` finds a connection by its alias, where an engine's connection need not be.
    """
    if connection.in_atomic_block:
        yield
        return
    connection.set_autocommit(False, force_begin_transaction_with_broken_autocommit=True)
    try:
        yield
        connection.commit()
    except BaseException:
        with suppress(Exception):  # the first error is more useful
            connection.rollback()
        raise
    finally:
        connection.set_autocommit(True)


@contextmanager
def all_or_nothing(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Run the block in a transaction of this connection, or in a savepoint of the open one."""
    if connection.in_atomic_block:  # of the alias's connection, then
        with transaction.atomic(using=connection.alias):
            yield
    else:
        with single_transaction(connection):
            yield
