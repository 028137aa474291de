"""Batch listeners at their edges: what a call must not do to the events of its neighbours."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from tests.table import listening, row, write
from tests.test_batches import (
    FAR,
    Bulk,
    all_are,
    deliver,
    everywhere,
    outside,
    statuses,
)

LONG = '{"text":"' + 989 * "x" + '"}'  # a payload of a thousand characters


def nothing_is_new() -> bool:
    return Status.NEW not in statuses().values()


def ids_of(events: list[outbox.Event]) -> list[str]:
    return [each.event_id for each in events]


# -- answers ---------------------------------------------------------------------------------------


@outside
@everywhere
@pytest.mark.parametrize("kind", ["plain", "async", "atomic"])
def test_a_returned_exception_is_not_an_answer(run: str, kind: str) -> None:
    """Otherwise ``return error`` would end all events as done."""
    bulk = Bulk(lambda events: ValueError("no"))

    async def awaited(events: list[outbox.Event]) -> Any:
        return bulk(events)

    ids = write(3)
    call = awaited if kind == "async" else bulk
    with listening(call, batch=3, retry=FAR, atomic=kind == "atomic"):
        deliver(run, all_are(Status.RETRY))
    assert bulk.sizes == [3]
    assert "answered ValueError" in (row(ids[0]).last_error or "")


@outside
@everywhere
@pytest.mark.parametrize(
    "error",
    [SystemExit(1), asyncio.CancelledError(), GeneratorExit(), outbox.RetryAfter(600)],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_any_exception_is_an_answer(run: str, kind: str, error: BaseException) -> None:
    ids = write(3)
    bulk = Bulk(lambda events: [error if each.event_id == ids[1] else None for each in events])

    async def awaited(events: list[outbox.Event]) -> Any:
        return bulk(events)

    with listening(awaited if kind == "async" else bulk, batch=3, retry=FAR):
        deliver(run, nothing_is_new)
    assert [statuses()[each] for each in ids] == [Status.DONE, Status.RETRY, Status.DONE]


@outside
@everywhere
@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit])
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_what_would_end_a_thread_is_a_failure(
    run: str, kind: str, error: type[BaseException]
) -> None:
    ids = write(4)

    def work(events: list[outbox.Event]) -> None:
        if ids[1] in ids_of(events):
            raise error

    bulk = Bulk(work)

    async def awaited(events: list[outbox.Event]) -> Any:
        return bulk(events)

    with listening(awaited if kind == "async" else bulk, batch=4, retry=FAR):
        deliver(run, nothing_is_new)
    assert [statuses()[each] for each in ids] == [1, 2, 1, 1]
