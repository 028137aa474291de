"""Writer hooks: their order, changed and suppressed events, every end of a transaction."""

from __future__ import annotations

import gc
import logging
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import TestCase

import django_outbox as outbox
from django_outbox import DuplicateEvent, Event, InvalidEvent, signals, write, write_many
from django_outbox.models import OutboxEvent
from tests import samples
from tests.table import by_api, by_sql
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

heard: list[Any] = []  # the calls of this module's hooks, in order


def types(events: list[Event]) -> str:
    return " ".join(event.event_type for event in events)


class Telling:
    """Records every call."""

    def before_write(self, events: list[Event]) -> list[Event]:
        heard.append(("before_write", types(events)))
        return events

    def after_write(self, events: list[Event]) -> None:
        heard.append(("after_write", types(events)))

    def after_commit(self, events: list[Event]) -> None:
        heard.append(("after_commit", types(events)))

    def after_rollback(self, events: list[Event]) -> None:
        heard.append(("after_rollback", types(events)))


class Ends:
    """Records commits and rollbacks only."""

    def after_commit(self, events: list[Event]) -> None:
        heard.append(("committed", types(events)))

    def after_rollback(self, events: list[Event]) -> None:
        heard.append(("rolled back", types(events)))


class Stamping:
    def before_write(self, events: list[Event]) -> list[Event]:
        return [replace(each, headers={**each.headers, "by": "hook"}) for each in events]


class Renaming:
    def before_write(self, events: list[Event]) -> Iterator[Event]:
        return (replace(each, event_type=f"{each.event_type}.v2", payload=[]) for each in events)


class Auditing:
    """Adds an audit event for each event."""

    def before_write(self, events: list[Event]) -> list[Event]:
        audits = [replace(each, event_type="audit", event_id="") for each in events]
        return [*events, *audits]


class Answering:
    """Returns what the test wants."""

    answer: Callable[[list[Event]], Any]

    def before_write(self, events: list[Event]) -> Any:
        heard.append(types(events))
        return Answering.answer(events)


class OnlyWritten:
    def after_write(self, events: list[Event]) -> None:
        heard.append(("after_write", events))


class OnlyCommitted:
    def after_commit(self, events: list[Event]) -> None:
        heard.append(("after_commit", events))


class Failing:
    def after_write(self, events: list[Event]) -> None:
        raise ZeroDivisionError("after_write")

    def after_commit(self, events: list[Event]) -> None:
        raise ZeroDivisionError("after_commit")

    def after_rollback(self, events: list[Event]) -> None:
        raise ZeroDivisionError("after_rollback")


class Undone(Exception):
    """Stands for an error in business code."""


@pytest.fixture(autouse=True)
def empty_log() -> Iterator[None]:
    heard.clear()
    yield
    heard.clear()


def use(settings: Any, *classes: type, **more: Any) -> None:
    settings.OUTBOX = {
        "WRITER_HOOKS": [f"{each.__module__}.{each.__qualname__}" for each in classes],
        **more,
    }


@contextmanager
def undone() -> Iterator[None]:
    """Roll back a transaction, or a savepoint in one, by raising an error."""
    with suppress(Undone), transaction.atomic():
        yield
        raise Undone


@contextmanager
def logging_inserts() -> Iterator[None]:
    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "INSERT" in sql:
            heard.append("INSERT")
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note):
        yield


def stored() -> list[str]:
    return [*OutboxEvent.objects.order_by("pk").values_list("event_type", flat=True)]


def events(*names: str) -> list[Event]:
    return [Event(event_type=name) for name in names]


# --- when they are called -------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["after_commit", "after_rollback"])
def test_the_order_of_everything(settings: Any, ends: str) -> None:
    use(settings, Telling)

    def receiver(event: Event, **kwargs: Any) -> None:
        heard.append(("event_written", event.event_type))

    signals.event_written.connect(receiver)
    try:
        with suppress(Undone), transaction.atomic(), logging_inserts():
            write("x")
            heard.append("the end of the block")
            if ends == "after_rollback":
                raise Undone
    finally:
        signals.event_written.disconnect(receiver)
    assert heard == [
        ("before_write", "x"),
        "INSERT",
        ("event_written", "x"),
        ("after_write", "x"),
        "the end of the block",
        (ends, "x"),
    ]


def test_the_writes_of_a_transaction_are_told_of_together_at_its_end(settings: Any) -> None:
    use(settings, Telling)
    with transaction.atomic():
        write("a")
        write_many(events("b", "c"))
        assert len(connection.run_on_commit) == 1
    assert heard == [
        ("before_write", "a"),
        ("after_write", "a"),
        ("before_write", "b c"),
        ("after_write", "b c"),
        ("after_commit", "a b c"),
    ]


def test_hooks_see_what_was_stored_whatever_becomes_of_the_callers_objects(settings: Any) -> None:
    use(settings, OnlyWritten, OnlyCommitted)
    payload = {"n": (1, 2)}
    with transaction.atomic():
        event_id = write("x", payload, headers={"h": "1"})
        payload["n"] = (3,)  # type: ignore[assignment]
    for _, [event] in heard:
        assert (event.event_id, event.headers) == (event_id, {"h": "1"})
        assert event.payload == {"n": [1, 2]}
    assert len(heard) == 2


def test_a_write_on_each_alias_ends_with_its_own_transaction(settings: Any) -> None:
    use(settings, Ends)
    with transaction.atomic(using="other"):
        write("there", using="other")
        with undone():
            write("here")
        assert heard == [("rolled back", "here")]
    assert heard[1:] == [("committed", "there")]


# These settings switch off delivery after the commit, but not hooks.
@pytest.mark.parametrize("more", [{"ENABLED": False}, {"MODE": "writer_only"}], ids=str)
def test_hooks_are_told_where_nothing_is_delivered(
    settings: Any, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(settings, Telling, **more)
    rung: list[Any] = []
    monkeypatch.setattr("django_outbox.doorbell.ring", rung.append)
    with transaction.atomic():
        write("x")
    with undone():
        write("y")
    assert [each for each in heard if each[0] in ("after_commit", "after_rollback")] == [
        ("after_commit", "x"),
        ("after_rollback", "y"),
    ]
    assert rung == []


def test_a_duplicate_that_is_ignored_is_not_told_as_written(settings: Any) -> None:
    use(settings, Telling)
    with transaction.atomic():
        write("first", unique_key="u")
        write("second", unique_key="u", on_duplicate="ignore")
    assert [each for each in heard if each[0] != "before_write"] == [
        ("after_write", "first"),
        ("after_commit", "first"),
    ]


# --- before the write -----------------------------------------------------------------------------


def test_before_write_may_change_events(settings: Any) -> None:
    use(settings, Stamping, Renaming)
    with transaction.atomic():
        event_id = write("x", {"a": 1}, deliver_after=60, tenant_id="t")
    row = OutboxEvent.objects.get()
    assert (row.event_id, row.event_type, row.payload) == (event_id, "x.v2", "[]")
    assert (row.headers, row.tenant_id) == ('{"by":"hook"}', "t")
    assert row.deliver_at is not None


def test_before_write_may_add_events(settings: Any) -> None:
    use(settings, Auditing)
    with transaction.atomic():
        first = write("x")
        many = write_many(events("y", "z"))
    assert stored() == ["x", "audit", "y", "z", "audit", "audit"]
    assert OutboxEvent.objects.get(pk=first).event_type == "x"
    assert len(many) == 4


def test_events_that_a_hook_adds_are_all_or_none(settings: Any) -> None:
    with transaction.atomic():
        taken = write("x", unique_key="u")
    use(settings, Answering)
    Answering.answer = lambda given: [*events("audit"), *given]
    with transaction.atomic():
        with pytest.raises(DuplicateEvent):
            write("y", unique_key="u")
        Order.objects.create(sku="goes on")
    Answering.answer = lambda given: [*given, *events("audit")]
    with transaction.atomic():
        assert write("y", unique_key="u", on_duplicate="ignore") == taken
    assert stored() == ["x"]
    assert Order.objects.exists()


@pytest.mark.parametrize("nothing", [None, [], ()], ids=repr)
def test_before_write_may_suppress(settings: Any, nothing: Any) -> None:
    use(settings, Answering, Telling)
    Answering.answer = lambda given: nothing
    with transaction.atomic(), logging_inserts():
        assert write("x") is None
        assert write_many(events("x", "y")) == []
        assert connection.run_on_commit == []
    assert heard == ["x", "x y"]  # no later hook, no INSERT, nothing after it
    assert stored() == []


def test_an_error_before_the_write_reaches_the_caller_and_nothing_is_inserted(
    settings: Any,
) -> None:
    use(settings, Answering, Telling)
    Answering.answer = lambda given: 1 / 0
    with transaction.atomic(), logging_inserts():
        for call in (lambda: write("x"), lambda: write_many(events("x"))):
            with pytest.raises(ZeroDivisionError):
                call()
        assert heard == ["x", "x"]
        Order.objects.create(sku="goes on")
    assert stored() == []
    assert Order.objects.exists()


WRONG: dict[str, tuple[Callable[[list[Event]], Any], type[Exception], str]] = {
    "one event": (lambda given: given[0], InvalidEvent, "returned Event; expected a list"),
    "text": (lambda given: "x", InvalidEvent, "returned str among its events"),
    "other": (lambda given: [*given, 5], InvalidEvent, "returned int among its events"),
    "payload": (
        lambda given: [replace(given[0], payload={1})],
        InvalidEvent,
        "cannot be written as JSON",
    ),
    "type": (lambda given: [replace(given[0], event_type="")], InvalidEvent, "event_type is ''"),
    "twice": (lambda given: [*given, *given], DuplicateEvent, "same event_id"),
    "copy": (lambda given: [*given, replace(given[0], payload=1)], DuplicateEvent, 'event_id=""'),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_before_write_returns_is_checked_before_any_sql(settings: Any, name: str) -> None:
    answer, error, says = WRONG[name]
    use(settings, Answering)
    Answering.answer = answer
    with transaction.atomic():
        with logging_inserts(), pytest.raises(error, match=says):
            write("x")
        assert heard == ["x"]
        Order.objects.create(sku="goes on")
    assert stored() == []


def test_hooks_are_not_asked_about_what_cannot_be_written(settings: Any) -> None:
    use(settings, Telling)
    with pytest.raises(outbox.NoActiveTransaction):
        write("x")
    with transaction.atomic(), pytest.raises(InvalidEvent):
        write("")
    assert heard == []


# --- errors afterwards ----------------------------------------------------------------------------


def test_errors_after_the_write_are_logged_and_swallowed(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    use(settings, Failing, Telling)
    with transaction.atomic():
        write("x")
        transaction.on_commit(partial(heard.append, "others go on"))
    with undone():
        write("y")
    assert stored() == ["x"]
    assert [each for each in heard if each[0] != "before_write"] == [
        ("after_write", "x"),
        ("after_commit", "x"),
        "others go on",
        ("after_write", "y"),
        ("after_rollback", "y"),
    ]
    failed = [each for each in caplog.records if each.name == "django_outbox"]
    moments = ["after_write", "after_commit", "after_write", "after_rollback"]
    assert [str(each.exc_info[1]) for each in failed if each.exc_info] == moments
    assert all(each.levelno == logging.ERROR for each in failed)
    assert f"Failing.{moments[0]}" in failed[0].getMessage()


def test_hooks_are_told_of_a_commit_though_the_hand_over_fails(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(settings, Ends)
    monkeypatch.setattr("django_outbox.doorbell.ring", lambda connection: 1 / 0)
    with transaction.atomic():
        write("x")
    assert heard == [("committed", "x")]


# --- the ends of transactions ---------------------------------------------------------------------


def test_an_undone_savepoint_is_told_of_at_once_and_takes_only_its_own_along(settings: Any) -> None:
    use(settings, Ends)
    with transaction.atomic():
        write("before")
        with undone():
            write("undone")
            with transaction.atomic():
                write("inside")
        assert sorted(heard) == [("rolled back", "inside"), ("rolled back", "undone")]
        with transaction.atomic():
            write("kept")
            transaction.on_commit(partial(heard.append, "after the hooks"))
        write("after")
    assert heard[2:] == [("committed", "before after"), ("committed", "kept"), "after the hooks"]
    assert stored() == ["before", "kept", "after"]


def test_savepoints_that_were_kept_are_undone_with_the_whole(settings: Any) -> None:
    use(settings, Ends)
    with undone():
        with transaction.atomic():
            write("inner")
            with transaction.atomic(), transaction.atomic():
                write("innermost")
        write("outer")
        with transaction.atomic(savepoint=False):
            write("without a savepoint")
        assert heard == []
    ended = [
        name for end, names in heard for name in names.split(" ", 1)[:1] if end == "rolled back"
    ]
    assert sorted(ended) == ["inner", "innermost", "outer", "without"]
    assert stored() == []


def test_an_error_in_a_block_without_a_savepoint_undoes_the_whole(settings: Any) -> None:
    use(settings, Ends)
    with transaction.atomic():
        write("outer")
        with suppress(Undone), transaction.atomic(savepoint=False):
            write("inner")
            raise Undone
        assert heard == []
    assert sorted(heard) == [("rolled back", "inner"), ("rolled back", "outer")]


@pytest.mark.parametrize("undo", [by_api, by_sql])
def test_a_raw_savepoint_is_unknown_to_django_and_so_to_hooks(
    settings: Any, undo: Callable[[str], None]
) -> None:
    """This holds for every on-commit callback; test_hot shows that nothing undone is delivered."""
    use(settings, Ends)
    with transaction.atomic():
        sid = connection.savepoint()
        write("undone")
        undo(sid)
        write("kept")
        assert heard == []
    assert heard == [("committed", "undone kept")]
    assert stored() == ["kept"]


def test_a_connection_closed_inside_the_transaction_is_told_as_a_rollback(settings: Any) -> None:
    use(settings, Ends)
    with transaction.atomic():
        write("x")
        connection.close()
        assert heard == [("rolled back", "x")]
    assert stored() == []


# --- other people's callbacks ---------------------------------------------------------------------


def failing() -> None:
    raise Undone


@pytest.mark.parametrize("inside", [False, True], ids=["flat", "savepoint"])
def test_somebodys_failing_callback_is_a_commit(settings: Any, inside: bool) -> None:
    """Django calls none of the callbacks behind it, which are two of ours with a savepoint."""
    use(settings, Ends)
    with pytest.raises(Undone), transaction.atomic():
        transaction.on_commit(partial(heard.append, "first"))
        transaction.on_commit(failing)
        write("x")
        if inside:
            with transaction.atomic():
                write("y")
        with undone():
            write("undone")
        write("z")
    assert heard[:2] == [("rolled back", "undone"), "first"]
    assert sorted(heard[2:]) == [("committed", "x z"), *[("committed", "y")] * inside]


@pytest.mark.parametrize("robust", [False, True])
def test_somebodys_callback_runs_once_and_as_robustly_as_before(
    settings: Any, robust: bool, caplog: pytest.LogCaptureFixture
) -> None:
    use(settings, Ends)
    with suppress(Undone), transaction.atomic():
        transaction.on_commit(partial(heard.append, "first"), robust=robust)
        transaction.on_commit(failing, robust=robust)
        write("x")
    assert heard == ["first", ("committed", "x")]
    assert ("failing" in caplog.text) is robust


# --- captured callbacks ---------------------------------------------------------------------------


def test_a_captured_block_already_begun_is_not_shifted(
    settings: Any, django_capture_on_commit_callbacks: Any
) -> None:
    """The block skips as many callbacks as there were when it began: none may be inserted."""
    use(settings, Ends)
    with transaction.atomic():
        transaction.on_commit(partial(heard.append, "somebody's"))
        with django_capture_on_commit_callbacks(execute=True) as captured:
            write("x")
        assert len(captured) == 1
        assert heard == [("committed", "x")]
        write("y")
    assert heard[1:] == ["somebody's", ("committed", "y")]


class InATestCase(TestCase):
    """Run by the tests below; Django rolls back when each test ends."""

    def test_captured(self) -> None:
        with self.captureOnCommitCallbacks(execute=True) as captured, transaction.atomic():
            transaction.on_commit(noting)
            write("x")
            write("y")
            with undone():
                write("undone")
        self.assertEqual(captured[0], noting)  # noqa: PT009
        self.assertEqual(len(captured), 2)  # noqa: PT009
        with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
            write("z")

    def test_not_captured(self) -> None:
        with transaction.atomic():
            write("x")
        heard.append("the end of the test")

    def test_somebodys_failure(self) -> None:
        with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
            write("x")
        with suppress(Undone), self.captureOnCommitCallbacks(execute=True), transaction.atomic():
            transaction.on_commit(failing)
            write("y")
        heard.append("the end of the test")


InATestCase.__test__ = False  # type: ignore[attr-defined]


def noting() -> None:
    heard.append("somebody's")


def run(name: str) -> None:
    result = unittest.TestResult()
    unittest.TestSuite([InATestCase(name)]).run(result)
    assert (result.testsRun, result.errors, result.failures) == (1, [], [])
    gc.collect()


def test_a_captured_block_of_a_testcase_is_told_as_a_commit(settings: Any) -> None:
    use(settings, Ends)
    run("test_captured")
    assert heard == [
        ("rolled back", "undone"),
        "somebody's",
        ("committed", "x y"),
        ("committed", "z"),
    ]


def test_what_a_testcase_undoes_is_told_as_a_rollback_when_it_is_over(settings: Any) -> None:
    use(settings, Ends)
    run("test_not_captured")
    assert heard == ["the end of the test", ("rolled back", "x")]
    heard.clear()
    run("test_somebodys_failure")
    assert heard == [("committed", "x"), "the end of the test", ("rolled back", "y")]


# --- queries inside after_rollback ----------------------------------------------------------------


class Asking:
    """Queries and writes while Django rolls back."""

    def after_rollback(self, events: list[Event]) -> None:
        for alias in ("other", "default"):
            try:
                heard.append((alias, OutboxEvent.objects.using(alias).count()))
            except transaction.TransactionManagementError as error:
                heard.append((alias, str(error)))
        with transaction.atomic():
            write("x")


@pytest.mark.parametrize("level", ["savepoint", "transaction"])
def test_queries_on_the_alias_are_refused_inside_after_rollback(
    settings: Any, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    use(settings, Asking)
    if level == "transaction":
        with undone():
            write("x")
    else:
        with transaction.atomic():
            with undone():
                write("x")
            Order.objects.create(sku="goes on")
        assert Order.objects.exists()
    assert heard[0] == ("other", 0)
    assert heard[1][0] == "default"
    assert "inside after_rollback" in heard[1][1]
    assert "Asking.after_rollback" in caplog.text  # its write was refused too
    assert stored() == []
    with transaction.atomic():
        assert write("goes on")
    assert stored() == ["goes on"]


# --- settings -------------------------------------------------------------------------------------


def test_one_instance_of_a_hook_serves_all_writes(settings: Any) -> None:
    use(settings, Counting)
    for _ in range(3):
        with transaction.atomic():
            write("x")
    assert heard == [1, 2, 3]


class Counting:
    def __init__(self) -> None:
        self.writes = 0

    def after_write(self, events: list[Event]) -> None:
        self.writes += 1
        heard.append(self.writes)


# --- the how-to -----------------------------------------------------------------------------------


def test_the_samples_of_the_how_to(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "shop")
    with samples.modules("how-to/hook-into-writing.md#..A Django signal that also writes") as shop:
        settings.OUTBOX = {**shop["settings"].OUTBOX, "CONTEXT_PROVIDERS": ["shop.context.trace"]}
        shop["shop.context"].trace_id.set("t-1")
        with transaction.atomic():
            assert write("order.placed", {"card": "4111"}, tenant_id="test") is None
            first = write("order.placed", {"sku": "tea", "card": "4111"})
        with undone():
            second = write("order.placed", {}, headers={"trace-id": "own"})
    row = OutboxEvent.objects.get()
    assert (row.event_id, row.payload, row.headers) == (
        first,
        '{"sku":"tea"}',
        '{"trace-id":"t-1"}',
    )
    said = [each.getMessage() for each in caplog.records if each.name == "shop"]
    assert [each.split(" order.placed ")[0] for each in said] == [
        "written, not committed yet:",
        "committed:",
        "written, not committed yet:",
        "rolled back:",
    ]
    ids = [str(first)] * 2 + [str(second)] * 2
    assert [mine in each for mine, each in zip(ids, said, strict=True)] == [True] * 4
