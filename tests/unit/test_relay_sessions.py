"""Which connection a relay uses: its own, never that of the process that it was forked from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

import django_outbox as outbox
from django_outbox.queue_settings import RelaySettings
from django_outbox.relays import Backend
from django_outbox.relays.relay import Relay


class Counted(Backend):
    """A backend that notes what each of its objects does."""

    made: ClassVar[list[Counted]] = []

    def __init__(self) -> None:
        super().__init__()
        self.made.append(self)
        self.calls: list[str] = []

    def open(self) -> None:
        self.calls.append("open")

    def publish(self, messages: Any, deadline: float) -> list[None]:
        self.calls.append("publish")
        return [None for _ in messages]

    def check(self) -> None:
        self.calls.append("check")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def relay() -> Iterator[Relay]:
    Counted.made = []
    path = f"{__name__}.{Counted.__name__}"
    yield Relay(RelaySettings(name="orders", BACKEND=path, EVENTS=["order.*"], TO="orders"))
    Counted.made = []


def send(relay: Relay) -> None:
    event = outbox.Event(event_type="order.placed", payload={})
    assert relay([event.as_delivered("{}", lambda text: {})]) == [None]


def fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on as a process that was forked from this one."""
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)


def calls() -> list[list[str]]:
    return [each.calls for each in Counted.made]


def test_a_process_uses_one_connection(relay: Relay) -> None:
    send(relay)
    send(relay)
    relay.close()
    assert calls() == [["open", "publish", "publish", "close"]]


@pytest.mark.parametrize("use", [send, Relay.check], ids=["publish", "check"])
def test_a_forked_process_opens_a_connection_of_its_own(
    use: Callable[[Relay], None], relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(relay)
    (parents,) = calls()
    before = [*parents]
    fork(monkeypatch)
    use(relay)
    assert calls() == [before, before]
    relay.close()
    assert calls() == [before, [*before, "close"]]


def test_a_forked_process_does_not_close_the_connection_of_its_parent(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(relay)
    fork(monkeypatch)
    relay.close()
    assert calls() == [["open", "publish"]]
