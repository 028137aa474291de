"""Capture what relays would send, without a broker, or let them send.

Otherwise they refuse to send in a test run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from ..conf import current
from ..exceptions import BrokerUnavailable
from ..queue_settings import RelaySettings
from ..relays import Backend, Message, Outcome
from ..relays.relay import Relay, backend_class, missing_client, relays

Failure = BaseException | type[BaseException]


class Relayed(Mapping[str, Sequence[Message]]):
    """The messages that relays would have sent, in order, by the name of the relay.

    ``capture_relayed`` yields it. ``fail_with`` may be changed within the block: ``None`` ends an
    outage.

    Example::

        def bodies(relayed: Relayed, name: str) -> list[bytes]:
            return [message.body for message in relayed[name]]
    """

    def __init__(self, fail_with: Failure | None) -> None:
        self.fail_with = fail_with
        self._messages: dict[str, list[Message]] = {}

    def __getitem__(self, name: str) -> Sequence[Message]:
        if name not in current().relays:
            known = ", ".join(current().relays) or "none"
            raise KeyError(f'OUTBOX["RELAYS"] has no relay {name!r}; it has {known}.')
        return [*self._messages.get(name, ())]

    def __iter__(self) -> Iterator[str]:
        return iter(current().relays)

    def __len__(self) -> int:
        return len(current().relays)

    def __repr__(self) -> str:
        sent = {name: [str(each.event) for each in self[name]] for name in self}
        return f"<Relayed: {sent}>"

    def _take(self, name: str, messages: Sequence[Message]) -> list[Outcome]:
        if (failure := self._failure()) is None:
            self._messages.setdefault(name, []).extend(messages)
        elif isinstance(failure, BrokerUnavailable):
            raise failure
        return [failure for _ in messages]

    def _failure(self) -> BaseException | None:
        found = self.fail_with() if isinstance(self.fail_with, type) else self.fail_with
        return None if found is None else found.with_traceback(None)


@contextmanager
def capture_relayed(fail_with: Failure | None = None) -> Iterator[Relayed]:
    """Capture what relays send within the block, in any thread of this process; send nothing.

    Each message counts as confirmed; with ``fail_with``, an exception or its class, each fails with
    that. ``BrokerUnavailable`` is an outage. The client of the backend need not be installed.

    Example::

        RELAY = {
            "BACKEND": "django_outbox.relays.kafka.Kafka",
            "EVENTS": ["order.*"],
            "TO": "shop.orders",
            "OPTIONS": {"bootstrap.servers": "kafka:9092"},
        }


        @override_settings(OUTBOX={"RELAYS": {"orders": RELAY}})
        def test_an_order_is_sent():
            with transaction.atomic():
                outbox.write("order.placed", {"order": 7})
            with capture_relayed() as relayed:
                drain()
            assert [message.to for message in relayed["orders"]] == ["shop.orders"]
    """
    relayed = Relayed(fail_with)
    with _backends(lambda settings: _capturing(relayed, settings)):
        yield relayed


@contextmanager
def send_relayed() -> Iterator[None]:
    """Let relays send to their brokers within the block, which they refuse in a test run.

    Example::

        def test_with_a_broker():
            with send_relayed():
                drain()
    """
    with _backends(backend_class):
        yield


@contextmanager
def _backends(find_class: Callable[[RelaySettings], type[Backend]]) -> Iterator[None]:
    before = vars(Relay)["find_class"]
    try:
        _replace_class(staticmethod(find_class))
        yield
    finally:
        _replace_class(before)


def _replace_class(find_class: Any) -> None:
    Relay.find_class = find_class
    for each in relays():
        each.close()  # the next event opens a backend of the new class


def _capturing(relayed: Relayed, settings: RelaySettings) -> type[Backend]:
    """Return a class that captures, and is otherwise like that of the settings."""
    real = _real_class(settings)

    class Capturing(Backend):
        per_key = real.per_key
        attribute_prefix = real.attribute_prefix
        commands = real.commands
        quote = staticmethod(real.quote)

        def __init__(self, **options: Any) -> None:
            super().__init__()

        def publish(self, messages: Sequence[Message], deadline: float) -> list[Outcome]:
            return relayed._take(settings.name, messages)

        def check(self) -> None:
            if isinstance(failure := relayed._failure(), BrokerUnavailable):
                raise failure

    return Capturing


def _real_class(settings: RelaySettings) -> type[Backend]:
    try:
        return backend_class(settings)
    except ImproperlyConfigured as error:
        if missing_client(settings.BACKEND, error):
            return Backend
        raise
