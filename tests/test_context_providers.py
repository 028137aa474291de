"""Context providers: headers that are added to every write."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

import django_outbox as outbox
from django_outbox import Event, InvalidEvent, write, write_many
from django_outbox.events.json_text import decode_headers
from django_outbox.models import OutboxEvent

pytestmark = pytest.mark.django_db

session_key: ContextVar[str | None] = ContextVar("session_key", default=None)
calls: list[str] = []


def session() -> dict[str, str]:
    calls.append("session")
    key = session_key.get()
    return {} if key is None else {"session": key, "by": "session"}


def tenant() -> Mapping[str, str]:
    calls.append("tenant")
    return {"tenant": "t-1", "by": "tenant"}


def silent() -> None:
    return None


def failing() -> dict[str, str]:
    raise ZeroDivisionError("no context")


def numbers() -> dict[str, Any]:
    return {"n": 1}


def a_list() -> Any:
    return ["a"]


def surrogate() -> dict[str, str]:
    return {"a": "\ud800"}


class Provider:
    """A provider may be a class too: calling it returns the dict."""

    def __new__(cls) -> Any:
        return {"of": "a class"}


def use(settings: Any, *providers: Callable[[], Any], **more: Any) -> None:
    paths = [f"{each.__module__}.{each.__name__}" for each in providers]
    settings.OUTBOX = {"CONTEXT_PROVIDERS": paths, **more}


def headers_of(event_id: str | None) -> Mapping[str, str]:
    row = OutboxEvent.objects.get(pk=event_id)
    return decode_headers(row.headers)


@pytest.fixture(autouse=True)
def nothing_of_another_test() -> None:
    calls.clear()
    session_key.set(None)


def test_providers_are_merged_into_headers_and_the_later_wins(settings: Any) -> None:
    session_key.set("s-1")
    use(settings, session, tenant)
    with transaction.atomic():
        first = write("x")
    use(settings, tenant, session)
    with transaction.atomic():
        second = write("x")
    assert headers_of(first) == {"session": "s-1", "tenant": "t-1", "by": "tenant"}
    assert headers_of(second) == {"session": "s-1", "tenant": "t-1", "by": "session"}


def test_the_callers_headers_win(settings: Any) -> None:
    use(settings, tenant, Provider)
    with transaction.atomic():
        event_id = write("x", headers={"by": "the caller"})
        ready = write(Event(event_type="x", headers={"tenant": "own"}))
    assert headers_of(event_id) == {"tenant": "t-1", "by": "the caller", "of": "a class"}
    assert headers_of(ready) == {"tenant": "own", "by": "tenant", "of": "a class"}


def test_one_call_serves_all_events_of_a_write(settings: Any) -> None:
    use(settings, tenant)
    with transaction.atomic(), CaptureQueriesContext(connection) as sent:
        ids = write_many([Event(event_type="x"), Event(event_type="x", headers={"by": "own"})])
    assert calls == ["tenant"]
    assert [each["sql"].partition(" ")[0] for each in sent.captured_queries] == ["INSERT"]
    assert [headers_of(each)["by"] for each in ids] == ["tenant", "own"]


@pytest.mark.parametrize("provider", [silent, session], ids=["None", "{}"])
def test_a_provider_may_have_nothing_to_say(
    settings: Any, provider: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    use(settings, provider)
    with transaction.atomic():
        event_id = write("x")
    assert OutboxEvent.objects.get(pk=event_id).headers is None
    assert caplog.records == []


@pytest.mark.parametrize("provider", [failing, numbers, a_list, surrogate])
def test_a_provider_that_fails_is_logged_and_skipped(
    settings: Any, provider: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    use(settings, tenant, provider, Provider)
    with transaction.atomic():
        event_id = write("x")
    assert headers_of(event_id) == {"tenant": "t-1", "by": "tenant", "of": "a class"}
    [record] = caplog.records
    assert (record.name, record.levelno) == ("django_outbox", logging.ERROR)
    assert record.exc_info
    assert f"provider=tests.test_context_providers.{provider.__name__}" in record.getMessage()


def test_providers_are_not_asked_when_nothing_can_be_written(settings: Any) -> None:
    use(settings, tenant)
    with pytest.raises(outbox.NoActiveTransaction):
        write("x")
    with transaction.atomic(), pytest.raises(InvalidEvent):
        write("")
    assert calls == []


class Seeing:
    """A hook that records the headers it gets, and keeps one of them."""

    def before_write(self, events: list[Event]) -> list[Event]:
        calls.extend(f"{name}={text}" for each in events for name, text in each.headers.items())
        return [replace(each, headers={"tenant": each.headers["tenant"]}) for each in events]


def test_hooks_see_the_context_and_have_the_last_word(settings: Any) -> None:
    use(settings, tenant, WRITER_HOOKS=["tests.test_context_providers.Seeing"])
    with transaction.atomic():
        event_id = write("x")
    assert calls == ["tenant", "tenant=t-1", "by=tenant"]
    assert headers_of(event_id) == {"tenant": "t-1"}
