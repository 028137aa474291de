"""Options of ``outbox_worker`` that choose the queues to serve."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from ..conf import current


def add_queues(parser: ArgumentParser) -> None:
    """Add ``--queue`` and ``--exclude-queue`` to a command; both may be repeated."""
    parser.add_argument(
        "--queue",
        action="append",
        dest="queues",
        metavar="NAME",
        default=[],
        help="serve only this queue; may be repeated; default: all",
    )
    parser.add_argument(
        "--exclude-queue",
        action="append",
        dest="excluded_queues",
        metavar="NAME",
        default=[],
        help="do not serve this queue; may be repeated",
    )


def chosen_queues(options: dict[str, Any]) -> list[str] | None:
    """Return the queues to serve; None: all.

    Raises ``CommandError`` for a queue that ``OUTBOX["QUEUES"]`` does not have, and if none is
    left.
    """
    known, excluded = [*current().queues], options["excluded_queues"]
    if not (options["queues"] or excluded):
        return None
    unknown = dict.fromkeys(each for each in (*options["queues"], *excluded) if each not in known)
    expected = f"expected one of {', '.join(known)}"
    if unknown:
        names = ", ".join(map(repr, unknown))
        raise CommandError(f'OUTBOX["QUEUES"] does not have {names}; {expected}.')
    given = dict.fromkeys(options["queues"] or known)
    if not (left := [each for each in given if each not in excluded]):
        raise CommandError(f"--exclude-queue leaves no queue to serve; {expected}.")
    return left
