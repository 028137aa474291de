"""The context of log lines, which travels with an event."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction
from django.utils.module_loading import import_string

import django_outbox as outbox
from django_outbox.contrib import logs
from django_outbox.listeners import registry
from tests import samples
from tests.table import PLACED, listening, statuses, write
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

LOGS = "django_outbox.contrib.logs"
BOTH = {"CONTEXT_PROVIDERS": [f"{LOGS}.remember"], "INTERCEPTORS": [f"{LOGS}.restore"]}
everywhere = pytest.mark.parametrize("where", ["drain", "worker"])

logger = logging.getLogger("tests.shop")


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Collect the lines of the shop's log, with their context."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(self.format(record))

    handler = Handler()
    handler.setFormatter(logging.Formatter("%(message)s [%(outbox)s]"))
    handler.addFilter(logs.ContextFilter())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def deliver(where: str, count: int) -> None:
    if where == "drain":
        outbox.drain()
        return
    with outbox.Worker():
        wait_until(lambda: statuses().get("DONE", 0) == count, what=f"{count} DONE")


# -- log lines -------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_388_a_session_key_set_at_write_is_in_the_listeners_lines_and_gone_afterwards(
    settings: Any, lines: list[str], where: str, kind: str
) -> None:
    settings.OUTBOX = {**BOTH, "WORKERS": 1}

    def listen(event: outbox.Event) -> None:
        logger.info("reserved")

    async def alisten(event: outbox.Event) -> None:
        await asyncio.sleep(0)
        logger.info("reserved")

    with logs.context(session="s-7"):
        logger.info("placed")
        (first,) = write()
    (second,) = write()
    with listening(alisten if kind == "async" else listen):
        deliver(where, 2)
    logger.info("after")
    own = "event_id={} event_type=order.placed listener=order.placed attempt=1"
    assert lines[0] == "placed [session=s-7]"
    assert {*lines[1:3]} == {
        f"reserved [session=s-7 {own.format(first)}]",
        f"reserved [{own.format(second)}]",
    }
    assert lines[3] == "after []"


@everywhere
def test_lines_say_which_listener_and_which_attempt(
    settings: Any, lines: list[str], where: str
) -> None:
    settings.OUTBOX = BOTH

    def listen(event: outbox.Event) -> None:
        logger.info("called")
        if not event.attempts:
            raise outbox.RetryAfter(0)

    def fall_back(event: outbox.Event, failure: outbox.Failure) -> None:
        logger.info("saved")

    def refuse(event: outbox.Event) -> None:
        raise outbox.Unrecoverable

    with listening(listen, name="mail"), listening(refuse, name="post"):
        registry.fallback(refuse, fall_back)
        write()
        if where == "drain":
            outbox.drain()
        deliver(where, 2)
    told = sorted(line.partition("listener=")[2] + line[:6] for line in lines)
    assert told == [
        "order.placed mail attempt=1]called",
        "order.placed mail attempt=2]called",
        "order.placed post attempt=1]saved ",
    ]


def test_what_a_listener_writes_carries_the_context_on(settings: Any, lines: list[str]) -> None:
    """The first writer's context is passed on; the event's own fields are set anew."""
    settings.OUTBOX = BOTH

    def listen(event: outbox.Event) -> None:
        with transaction.atomic():
            outbox.write("order.paid")

    with (
        listening(listen),
        listening(lambda event: logger.info("%s", dict(event.headers)), "order.paid"),
        logs.context(session="s-7"),
    ):
        write()
    with (
        listening(listen),
        listening(lambda event: logger.info("%s", sorted(event.headers)), "order.paid"),
    ):
        outbox.drain()
    assert lines[0].startswith("['log.session'] [session=s-7 event_id=")
    assert "event_type=order.paid" in lines[0]


def test_contexts_nest_and_end(lines: list[str]) -> None:
    with logs.context(a=1, b=2):
        with logs.context(b=3):
            logger.info("inside")
            assert logs.remember() == {"log.a": "1", "log.b": "3"}
        logger.info("outside")
    assert lines == ["inside [a=1 b=3]", "outside [a=1 b=2]"]
    assert logs.remember() == {}


@everywhere
def test_structlogs_own_context_travels(settings: Any, where: str) -> None:
    structlog = pytest.importorskip("structlog")
    settings.OUTBOX = BOTH
    seen: list[dict[str, Any]] = []
    with structlog.contextvars.bound_contextvars(request=5):
        (event_id,) = write()
    with listening(lambda event: seen.append(structlog.contextvars.get_contextvars())):
        deliver(where, 1)
    assert seen == [
        {
            "request": "5",
            "event_id": event_id,
            "event_type": PLACED,
            "listener": PLACED,
            "attempt": "1",
        }
    ]
    assert structlog.contextvars.get_contextvars() == {}


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """Forget whether structlog is installed, before and after the test."""
    logs._structlog.cache_clear()
    yield
    logs._structlog.cache_clear()


def test_without_structlog_it_does_without(
    asked_anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "find_spec", lambda name: None)
    with logs.context(a=1):
        assert logs.remember() == {"log.a": "1"}


def test_structlog_is_imported_with_the_first_context() -> None:
    """Importing it takes half a second, and every worker imports this module for its formatter."""
    pytest.importorskip("structlog")
    script = """
import sys
from django_outbox.contrib import logs
assert "structlog" not in sys.modules
with logs.context(a=1):
    print("structlog" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout == b"True\n"


# -- the documentation -----------------------------------------------------------------------------


def test_the_samples_of_the_how_to(
    settings: Any, monkeypatch: pytest.MonkeyPatch, client: Any
) -> None:
    """A custom provider and interceptor work together with those of the package."""
    seen: list[tuple[Any, ...]] = []
    shop = type(sys)("shop_context")
    monkeypatch.setitem(sys.modules, "shop_context", shop)
    with samples.run("how-to/hook-into-writing.md#Carry context to listeners") as names:
        for name in ("remember_tenant", "for_tenant", "tenant"):
            setattr(shop, name, names[name])
        settings.OUTBOX = names["OUTBOX"]
        response = names["LogContext"](lambda request: write_for(names, "north"))(Request())
        assert import_string(names["LOGGING"]["filters"]["context"]["()"]) is logs.ContextFilter

        def look(event: outbox.Event) -> None:
            seen.append((names["tenant"].get(), logs.remember()))

        with listening(look):
            outbox.drain()
    assert response == "written"
    assert seen == [("north", {"log.request": "r-1"})]
    assert names["tenant"].get() == ""


class Request:
    headers = {"X-Request-ID": "r-1"}


def write_for(names: dict[str, Any], tenant: str) -> str:
    token = names["tenant"].set(tenant)
    write()
    names["tenant"].reset(token)
    return "written"
