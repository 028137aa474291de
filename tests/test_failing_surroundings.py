"""Log handlers, signal receivers and doorbells that raise: nothing stalls, and no thread ends."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from django.dispatch import Signal

import django_outbox as outbox
from django_outbox import signals
from django_outbox.doorbell.local import Local
from django_outbox.process import main
from django_outbox.process.probes import Probes
from django_outbox.process.supervisor import Signals
from tests.surroundings import by_whom, deliver
from tests.table import listening, statuses, write
from tests.waiting import wait_until

outside = pytest.mark.django_db(transaction=True)
TWICE = outbox.Fixed(delay=0, max_attempts=2)


@pytest.fixture(autouse=True)
def quick(settings: Any) -> None:
    settings.OUTBOX = {"WORKERS": 2, "PROBE_INTERVAL": 0.05, "POLL_INTERVAL": 0.2}


# -- logging ---------------------------------------------------------------------------------------


def away(*args: Any, **kwargs: Any) -> Any:
    raise OSError("log collector unreachable")


class Unreachable(logging.Handler):
    emit = away


class Unformattable(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        away(self.format(record))


@contextmanager
def handler(made: logging.Handler, *, of: str = "") -> Iterator[None]:
    logger = logging.getLogger(of)
    logger.addHandler(made)
    try:
        yield
    finally:
        logger.removeHandler(made)


@contextmanager
def filtered(*, handlers: bool) -> Iterator[None]:
    owner: Any = logging.Handler() if handlers else logging.getLogger("django_outbox")
    owner.addFilter(away)
    try:
        with handler(owner) if handlers else ExitStack():
            yield
    finally:
        owner.removeFilter(away)


@contextmanager
def record_factory() -> Iterator[None]:
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(away)
    try:
        yield
    finally:
        logging.setLogRecordFactory(before)


def formatting() -> logging.Handler:
    made = Unformattable()
    made.setFormatter(logging.Formatter("%(nothing)s"))
    return made


BROKEN: dict[str, Callable[[], Any]] = {
    "a handler of the root": lambda: handler(Unreachable()),
    "a handler of the package": lambda: handler(Unreachable(), of="django_outbox"),
    "a formatter": lambda: handler(formatting()),
    "a filter of a handler": lambda: filtered(handlers=True),
    "a filter of the logger": lambda: filtered(handlers=False),
    "the record factory": record_factory,
}
broken = pytest.mark.parametrize("logs", BROKEN.values(), ids=BROKEN)


@pytest.fixture
def everything_is_logged() -> Iterator[None]:
    logger = logging.getLogger("django_outbox")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    yield
    logger.setLevel(before)


@outside
@by_whom
@broken
@pytest.mark.usefixtures("everything_is_logged")
def test_logging_that_raises_stalls_nothing(logs: Callable[[], Any], by_drain: bool) -> None:
    def fail(event: outbox.Event) -> None:
        raise ValueError(event.event_id)

    with logs(), listening(fail, retry=TWICE), listening(lambda event: None, "order.done"):
        write(3)
        write(3, "order.done")
        write(2, key="k")
        deliver(until={"DEAD": 5, "DONE": 3}, by_drain=by_drain)


@outside
def test_an_error_in_a_callback_does_not_end_the_event_loop() -> None:
    """Asyncio logs it, and ended the loop when the handler raised."""

    def fail() -> None:
        raise ValueError

    async def listen(event: outbox.Event) -> None:
        asyncio.get_running_loop().call_soon(fail)
        await asyncio.sleep(0)

    with handler(Unreachable()), listening(listen):
        write(5)
        deliver(until={"DONE": 5}, by_drain=False)
        write(5)
        deliver(until={"DONE": 10}, by_drain=False)


# -- receivers -------------------------------------------------------------------------------------


class Receiver:
    """A receiver without a name, which Django cannot log."""

    def __call__(self, **facts: Any) -> None:
        raise LookupError("no such metric")


SIGNALS = [each for each in vars(signals).values() if isinstance(each, Signal)]


@outside
@by_whom
@pytest.mark.parametrize("is_logged", [True, False], ids=["logged", "with a handler that raises"])
@pytest.mark.parametrize("nameless", [False, True], ids=["function", "object"])
def test_446_receivers_that_raise_stall_nothing(
    nameless: bool, is_logged: bool, by_drain: bool
) -> None:
    calls: list[Any] = []

    def receive(**facts: Any) -> None:
        calls.append(facts)
        raise LookupError("no such metric")

    receiver: Any = partial(Receiver()) if nameless else receive
    for each in SIGNALS:
        each.connect(receiver)
    try:
        with (
            ExitStack() if is_logged else handler(Unreachable()),
            listening(lambda event: outbox.Dead("over") if event.key else None),
        ):
            write(3)
            write(2, key="a")
            deliver(until={"DONE": 3, "DEAD": 2}, by_drain=by_drain)
    finally:
        for each in SIGNALS:
            each.disconnect(receiver)
    assert nameless or calls


# -- the doorbell ----------------------------------------------------------------------------------


class Unprintable(Exception):
    def __str__(self) -> str:
        raise LookupError


class Silent(Local):
    """A doorbell that raises what cannot even be printed."""

    def ring(self, connection: Any) -> None:
        raise Unprintable

    def ear(self) -> Any:
        return Deaf()


class Deaf:
    sure = False

    def listen(self) -> None:
        raise Unprintable

    wait = close = listen


@outside
def test_a_doorbell_that_raises_stalls_nothing(settings: Any) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "DOORBELL": {"kind": f"{__name__}.Silent"}}
    with listening(lambda event: None):
        write(3)
        with outbox.Worker() as worker:
            wait_until(lambda: statuses() == {"DONE": 3})
            write(3)
            wait_until(lambda: statuses() == {"DONE": 6})
            assert worker.lost_threads == ()


# -- a thread that ends all the same ---------------------------------------------------------------


@outside
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("part", ["settler", "heartbeat", "claimer", "housekeeper", "watchdog"])
def test_a_thread_that_ends_ends_the_process(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    bases = {
        "settler": "settler.Settler.step",
        "heartbeat": "heartbeat.Heartbeat.step",
        "claimer": "claimer.Claimer.step",
        "housekeeper": "housekeeper.Housekeeper.step",
        "watchdog": "executor.Executor.watch",
    }

    def end(*args: Any) -> float:
        ended.set()
        raise SystemExit

    monkeypatch.setattr(f"django_outbox.worker.{bases[part]}", end)
    assert main.serve([None], Signals(), Probes(), drain_timeout=0.1) == 1
    assert ended.is_set()
