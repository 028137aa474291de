"""What relays promise whatever the broker, on real ones that stall, die and come back."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from django.utils.module_loading import import_string

import django_outbox as outbox
from django_outbox.exceptions import Unrecoverable
from django_outbox.models import OutboxEvent, OutboxPause
from django_outbox.relays import BrokerUnavailable
from django_outbox.relays.backend import Refused
from django_outbox.relays.session import Session
from tests import relay_messages
from tests.brokers import running
from tests.relay_adapters import ADAPTERS, Adapter
from tests.relay_messages import Proxy, kinds, message, messages, opened, publish, use_relay
from tests.waiting import wait_until

on_the_table = pytest.mark.django_db(transaction=True)

Status = OutboxEvent.Status


@pytest.fixture(scope="module", params=ADAPTERS)
def adapter(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapter]:
    made = ADAPTERS[request.param](tmp_path_factory.mktemp(request.param))
    with running(made.broker):
        yield made


@pytest.fixture(params=ADAPTERS)
def own(request: Any, tmp_path: Any) -> Iterator[Adapter]:
    """Yield a broker that the test may kill."""
    made = ADAPTERS[request.param](tmp_path)
    with running(made.broker):
        yield made


def named(adapter: Adapter) -> str:
    """Return TO for a new stream, topic, queue or path."""
    return adapter.prepare(f"test-{uuid4()}")


@pytest.fixture
def name(adapter: Adapter) -> str:
    return named(adapter)


@contextmanager
def connected(adapter: Adapter, name: str, **options: Any) -> Iterator[Session]:
    backend = import_string(f"django_outbox.relays.{adapter.backend}")(
        **{**adapter.options(name), **options}
    )
    backend.to = name
    with opened(backend) as session:
        yield session


@contextmanager
def killed(adapter: Adapter) -> Iterator[None]:
    adapter.broker.kill()
    try:
        yield
    finally:
        adapter.broker.restart()


def check(session: Session) -> None:
    session.run(session.backend.check, timeout=10)


# --- a batch --------------------------------------------------------------------------------------


def bodies(adapter: Adapter, found: Sequence[Any]) -> list[bytes]:
    """Return bodies as the broker keeps them: in their order, or in any."""
    return (
        [each.body for each in found] if adapter.in_order else sorted(each.body for each in found)
    )


def test_a_large_batch_is_confirmed_and_stored(adapter: Adapter, name: str) -> None:
    batch = [message(name, body=b'{"n":%d}' % n) for n in range(adapter.many)]
    with connected(adapter, name) as session:
        check(session)
        assert publish(session, batch, within=60) == [None] * adapter.many
    assert bodies(adapter, adapter.stored(name)) == bodies(adapter, batch)


def test_two_threads_publish_at_a_time(adapter: Adapter, name: str) -> None:
    many = range(adapter.many // 2)
    batches = [[message(name, body=b"%d-%d" % (at, n)) for n in many] for at in (0, 1)]
    found: dict[int, Any] = {}

    def send(at: int) -> None:
        found[at] = publish(session, batches[at], within=60)

    with connected(adapter, name) as session:
        threads = [threading.Thread(target=send, args=(at,)) for at in (0, 1)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
    assert found == {0: [None for _ in many], 1: [None for _ in many]}
    stored = adapter.stored(name)
    for batch in batches:
        mine = [each for each in stored if each.body[:2] == batch[0].body[:2]]
        assert bodies(adapter, mine) == bodies(adapter, batch)


def test_what_cannot_be_sent_fails_alone(adapter: Adapter, name: str) -> None:
    cases = [({"headers": {"name": "\ud800"}}, "is not text"), *adapter.impossible(name)]
    batch = [message(**{"to": name, **given}) for given, _ in cases]
    with connected(adapter, name) as session:
        outcomes = publish(session, [each for bad in batch for each in (bad, message(name))])
        assert publish(session, [message(name)]) == [None]
    for (_, said), outcome in zip(cases, outcomes[::2], strict=True):
        assert isinstance(outcome, Unrecoverable), outcome
        assert said in str(outcome)
    assert outcomes[1::2] == [None] * len(cases)
    # More than once, perhaps, what was refused together with another.
    assert len({each.headers["event-id"] for each in adapter.stored(name)}) == len(cases) + 1


def test_what_the_broker_refuses_fails_alone(adapter: Adapter, name: str) -> None:
    if not adapter.refusal:
        pytest.skip("a test on librdkafka's mock cluster has it refuse")
    refusing = adapter.refusing(name)
    batch = [message((name, refusing)[n % 2]) for n in range(adapter.many)]
    with connected(adapter, name) as session:
        outcomes = publish(session, batch, within=60)
        assert publish(session, [message(name)]) == [None]
    assert outcomes[::2] == [None] * (adapter.many // 2)
    assert all(isinstance(each, Refused) for each in outcomes[1::2])
    assert re.search(adapter.refusal, str(outcomes[1]))
    assert len(adapter.stored(name)) == adapter.many // 2 + 1


# --- outages --------------------------------------------------------------------------------------


def test_a_killed_broker_comes_back(
    own: Adapter, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    adapter, name, address = own, named(own), f"127.0.0.1:{own.broker.port}"
    with connected(adapter, name, timeout=2) as session:
        assert publish(session, messages(20, name)) == [None] * 20
        capfd.readouterr()
        with killed(adapter), caplog.at_level(logging.INFO):
            with pytest.raises(BrokerUnavailable, match=address):
                publish(session, messages(3, name), within=2)
            with pytest.raises(BrokerUnavailable):
                check(session)
            with (
                pytest.raises(BrokerUnavailable, match=r"refused|reached|connect"),
                connected(adapter, name, timeout=1) as another,
            ):
                check(another)
            if not adapter.is_logged:
                logged = [each for each in caplog.records if each.name != "werkzeug"]  # moto's
                assert (logged, capfd.readouterr()) == ([], ("", ""))
    with connected(adapter, name) as session:
        check(session)
        last = message(name, body=b"~last")
        assert publish(session, [last]) == [None]
    assert bodies(adapter, adapter.stored(name))[-1] == b"~last"


def test_a_connection_that_is_cut_in_mid_batch(adapter: Adapter, name: str) -> None:
    """What was confirmed before stays confirmed; the rest may be there or not."""
    if adapter.cut is None:
        pytest.skip("its answers come all at once, or each has a connection for itself")
    proxy, port = Proxy(adapter.broker.port), str(adapter.broker.port)
    options = {
        option: str(value).replace(port, str(proxy.port))
        for option, value in adapter.options(name).items()
    }
    batch = [message(name, body=b"%d" % n + b"x" * adapter.cut[1]) for n in range(adapter.many)]
    try:
        with connected(adapter, name, **options) as session:
            proxy.cut_at = adapter.cut[0]
            outcomes = publish(session, batch)
    finally:
        proxy.close()
    found = kinds(outcomes)
    assert 1 <= found[""] < len(batch)
    assert found == {"": found[""], "BrokerUnavailable": len(batch) - found[""]}
    sure = {each.body for each, outcome in zip(batch, outcomes, strict=True) if outcome is None}
    assert sure <= {each.body for each in adapter.stored(name)}


def test_a_broker_that_does_not_answer(adapter: Adapter, name: str) -> None:
    with connected(adapter, name, timeout=4) as session:  # for the first message
        assert publish(session, messages(1, name)) == [None]
        adapter.broker.pause()
        try:
            outcomes = publish(session, messages(300, name, body=b"x" * 90_000), within=1)
        except BrokerUnavailable:
            outcomes = []
        finally:
            adapter.broker.resume()
    assert {*kinds(outcomes)} <= {*adapter.silence}
    with connected(adapter, name) as session:
        assert publish(session, messages(1, name)) == [None]


def configure(settings: Any, adapter: Adapter, name: str, **own: Any) -> None:
    options = {"timeout": 5, **adapter.options(name)}
    use_relay(settings, adapter.backend, **{"to": name, "options": options, **own})


@pytest.fixture
def relay(settings: Any, adapter: Adapter, name: str) -> Callable[..., None]:
    """Return a function that configures a relay to the broker."""
    return partial(configure, settings, adapter, name)


write = partial(relay_messages.write, tenant_id="acme")


def expect_done(rows: list[OutboxEvent]) -> None:
    for row in rows:
        row.refresh_from_db()
    assert {(row.status, row.attempts) for row in rows} == {(Status.DONE, 0)}


def ids(adapter: Adapter, name: str) -> list[str]:
    return [each.headers["event-id"] for each in adapter.stored(name)]


@on_the_table
def test_an_outage_costs_no_attempts(settings: Any, own: Adapter) -> None:
    adapter, name = own, named(own)
    configure(settings, adapter, name)
    first = write()
    outbox.drain()
    expect_done([first])
    with outbox.Worker():
        with killed(adapter):
            rows = [write() for _ in range(20)]
            wait_until(OutboxPause.objects.filter(kind="breaker").exists)
        wait_until(lambda: not OutboxEvent.objects.exclude(status=Status.DONE).exists())
    expect_done(rows)
    assert {*ids(adapter, name)} >= {row.pk for row in rows}


@on_the_table
def test_events_of_a_key_keep_their_order(relay: Any, adapter: Adapter, name: str) -> None:
    relay()
    rows = [write(key=f"k{n % 5}") for n in range(50)]
    with outbox.Worker():
        wait_until(lambda: not OutboxEvent.objects.exclude(status=Status.DONE).exists())
    found = ids(adapter, name)
    assert len(found) == 50
    for n in range(5):
        expected = [row.pk for row in rows[n::5]]
        assert [each for each in found if each in expected] == expected


# --- what is sent ---------------------------------------------------------------------------------


@on_the_table
def test_a_plain_message(relay: Any, adapter: Adapter, name: str) -> None:
    relay()
    row = write(aggregate_type="shop.Order", key="order-7", headers={"trace": "Kännchen"})
    outbox.drain()
    (found,) = adapter.stored(name)
    expect_done([row])
    assert found.body == row.payload.encode()
    expected = {
        "trace": "Kännchen",
        "event-id": row.pk,
        "event-type": "order.placed",
        "occurred-at": row.occurred_at.isoformat(),
        "aggregate-type": "shop.Order",
        "aggregate-id": "7",
        "tenant-id": "acme",
        "event-key": "order-7",
    }
    others = {"content-type": "application/json", "Nats-Msg-Id": row.pk}
    assert expected.items() <= found.headers.items() <= {**expected, **others}.items()


@on_the_table
def test_a_cloudevent_in_headers(relay: Any, adapter: Adapter, name: str) -> None:
    relay(FORMAT="cloudevents", SOURCE="/shop")
    row = write()
    outbox.drain()
    (found,) = adapter.stored(name)
    assert (found.body, found.content_type) == (row.payload.encode(), "application/json")
    length = len(adapter.prefix)
    attributes = {
        each[length:]: value
        for each, value in found.headers.items()
        if each.startswith(adapter.prefix)
    }
    attributes.pop("datacontenttype", None)  # NATS has no property for it
    assert attributes == {
        "specversion": "1.0",
        "id": row.pk,
        "source": "/shop",
        "type": "order.placed",
        "time": row.occurred_at.isoformat().replace("+00:00", "Z"),
        "subject": "7",
        "partitionkey": "7",
        "tenantid": "acme",
        "trace": "t1",
    }
