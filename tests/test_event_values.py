"""Events, policies and answers are plain values: pickle, copy, hash and replace work."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, get_origin, get_type_hints

import pytest
from django.db import connection, transaction
from django.test import override_settings

import django_outbox as outbox
from django_outbox import Event, hooks
from django_outbox.events import event_from_row
from django_outbox.exceptions import DuplicateEvent, InvalidEvent, PayloadError
from django_outbox.models import OutboxEvent
from tests.cases import cases
from tests.table import PLACED, listening, row, statuses
from tests.test_hot import quiet, resting
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def pickled(protocol: int) -> Any:
    return lambda value: pickle.loads(pickle.dumps(value, protocol))


COPIES: dict[str, Any] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle{each}": pickled(each) for each in range(pickle.HIGHEST_PROTOCOL + 1)},
}
copies = cases("twin", COPIES.values(), ids=COPIES)
Twin = Callable[[Any], Any]
FIELDS: dict[str, Any] = {
    "payload": {"sku": "tea", "price": [1.5, None]},
    "headers": {"region": "eu"},
    "aggregate_type": "shop.Order",
    "aggregate_id": "7",
    "tenant_id": "t",
}
CARRIED = ("event_type", *FIELDS, "key")
TIMES = ("occurred_at", "available_at", "created_at", "deliver_at", "first_due_at")
NOT_CARRIED = (
    *(
        "event_id",
        "unique_key",
        "coalesce",
        "seq",
        *TIMES,
        "attempts",
        "source",
        "listener",
        "database",
    ),
)


class Tagged:
    """A serializer whose text is not JSON."""

    def dumps(self, payload: Any) -> str:
        return f"tagged:{json.dumps(payload)}"

    def loads(self, text: str) -> Any:
        if not text.startswith("tagged:"):
            raise ValueError("no tag")
        return json.loads(text.removeprefix("tagged:"))


def fresh(**fields: Any) -> Event:
    return Event(event_type=PLACED, **{**FIELDS, **fields})


def written(**fields: Any) -> Event:
    event = fresh(**fields)
    with transaction.atomic():
        outbox.write(event)
    return event


def cold(**fields: Any) -> Event:
    """Return an event as a listener gets it from the table."""
    got: list[Event] = []
    written(**fields)
    with listening(got.append):
        outbox.drain()
    assert [event.source for event in got] == ["cold"]
    return got[0]


def hot(**fields: Any) -> Event:
    """Return an event as a listener gets it from the process that wrote it."""
    got: list[Event] = []
    with override_settings(OUTBOX=quiet()), listening(got.append), resting():
        written(**fields)
        wait_until(lambda: statuses() == {"DONE": 1}, what="the delivery")
    assert [event.source for event in got] == ["hot"]
    return got[0]


def undecoded(**fields: Any) -> Event:
    """Return an event from the table that is not decoded yet."""
    stored = row(written(**fields).event_id)
    columns = {each.name for each in stored._meta.local_fields} - {"listener"}  # set at its call
    names = sorted(columns & {*Event.__slots__})
    values = [getattr(stored, name) for name in names]
    places = {name: place for place, name in enumerate(names)}
    return event_from_row(values, places, hooks.serializer().loads)


everywhere = pytest.mark.parametrize("made", [fresh, written, undecoded, cold, hot])
delivered = pytest.mark.parametrize("made", [cold, hot])
Made = Callable[..., Event]


def test_a_copy_of_a_written_event_is_in_no_slot() -> None:
    event = fresh(coalesce="index")
    assert dataclasses.replace(event).coalesce == "index"
    stored = event.as_delivered("{}", json.loads)
    assert dataclasses.replace(stored, event_type="other").coalesce is None


def test_the_type_of_the_payload_is_an_annotation_only() -> None:
    def listener(event: Event[int]) -> None: ...

    assert get_origin(get_type_hints(listener)["event"]) is Event
    event = Event[int](event_type=PLACED, payload=1)
    assert type(event) is Event
    assert event == dataclasses.replace(event)
    assert {twin(event).payload for twin in COPIES.values()} == {1}


# -- pickle, copy, hash ----------------------------------------------------------------------------


@everywhere
def test_an_event_copies_and_pickles(made: Made) -> None:
    event = made()
    for twin in COPIES.values():
        other = twin(event)
        assert other == event
        assert hash(other) == hash(event) == hash(event.event_id)
        assert repr(other) == repr(event)
        assert other.payload == FIELDS["payload"]
        with pytest.raises(TypeError):
            other.headers["region"] = "us"
        with pytest.raises(dataclasses.FrozenInstanceError):
            other.tenant_id = "another"
        assert len({event, other}) == 1


@copies
def test_a_copy_keeps_the_exact_text(twin: Twin) -> None:
    """The text given to ``from_json`` is stored unchanged, also when a copy is written."""
    assert twin(Event.from_json("x", " 12345.0 "))._payload_text == " 12345.0 "
    assert twin(Event.from_json("x", '{"b": 1.0}'))._payload_text == '{"b": 1.0}'


def no_decoding(text: str, type_: Any = None) -> Any:
    raise AssertionError("decoded")


@copies
def test_a_copy_does_not_decode_what_nobody_looked_at(twin: Twin) -> None:
    event = fresh().as_delivered("[1]", no_decoding)
    assert twin(event)._payload_text == "[1]"
    with pytest.raises(AssertionError, match="decoded"):
        assert twin(event).payload


@copies
def test_damaged_text_is_copied_as_it_is(twin: Twin) -> None:
    """Reading it raises ``PayloadError``; copying and pickling it does not."""
    damaged = {"event_id": "i", "event_type": "x", "payload": '{"a": ', "headers": '{"b"'}
    places = {name: place for place, name in enumerate(damaged)}
    other = twin(event_from_row([*damaged.values()], places, hooks.serializer().loads))
    assert (other.event_id, other._payload_text) == ("i", '{"a": ')
    assert hash(other) == hash("i")
    for name in ("payload", "headers"):
        with pytest.raises(PayloadError):
            getattr(other, name)


@copies
def test_a_copy_is_read_by_the_serializer_of_its_process(settings: Any, twin: Twin) -> None:
    settings.OUTBOX = {"SERIALIZER": f"{__name__}.Tagged"}
    event = undecoded()
    assert event._payload_text.startswith("tagged:")  # type: ignore[union-attr]
    other = twin(event)
    assert other._loads.__self__ is hooks.serializer()
    assert other.payload == event.payload == FIELDS["payload"]
    assert twin(other) == event
    assert other.payload_as(dict) == event.payload


# -- replace ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [fresh, written])
def test_replace_keeps_the_id_of_an_event_that_was_not_delivered(made: Made) -> None:
    event = made(unique_key="u")
    other = dataclasses.replace(event, payload=2)
    assert other == dataclasses.replace(event, payload=2)
    assert (other.event_id, other.unique_key) == (event.event_id, "u")
    assert (other.occurred_at, other.payload) == (event.occurred_at, 2)


@delivered
@copies
def test_replace_of_a_delivered_event_is_a_new_one(made: Made, twin: Twin) -> None:
    """Its content carries over; its identity, its times and its delivery do not."""
    OutboxEvent.objects.all().delete()  # of the copy before
    event = made(unique_key="u")
    other = dataclasses.replace(twin(event), event_type="order.forwarded")
    assert {name: getattr(other, name) for name in CARRIED[1:]} == {
        name: getattr(event, name) for name in CARRIED[1:]
    }
    empty = Event(event_type="x")
    for name in NOT_CARRIED:
        if name not in ("event_id", "occurred_at"):
            assert getattr(other, name) == getattr(empty, name), name
    assert other.event_id not in ("", event.event_id)
    assert other.occurred_at > event.occurred_at
    assert not other._id_was_given  # generated, so it is unique: written without a savepoint
    assert set(CARRIED) | set(NOT_CARRIED) == {
        each.name for each in dataclasses.fields(Event) if each.name[0] != "_"
    }


@delivered
@pytest.mark.parametrize("change", [{}, {"event_id": ""}], ids=["", "empty-id"])
def test_a_replaced_event_is_written(made: Made, change: dict[str, Any]) -> None:
    event = made(unique_key="u")
    with transaction.atomic():
        event_id = outbox.write(
            dataclasses.replace(event, event_type="order.forwarded", **change), using="default"
        )
        assert connection.in_atomic_block
    assert event_id not in (None, event.event_id)
    found = row(str(event_id))
    assert (found.event_type, found.aggregate_type) == ("order.forwarded", "shop.Order")
    assert (found.aggregate_id, found.tenant_id) == ("7", "t")
    assert json.loads(found.payload) == FIELDS["payload"]
    assert json.loads(str(found.headers)) == FIELDS["headers"]
    assert (found.attempts, found.unique_key, found.deliver_at) == (0, None, None)
    assert found.available_at == found.created_at > row(event.event_id).created_at


@delivered
def test_a_change_is_respected(made: Made) -> None:
    """A value that is given counts, also for a field that does not carry over."""
    event = made()
    later = event.occurred_at + timedelta(hours=1)
    other = dataclasses.replace(
        event,
        event_id="own",
        unique_key="again",
        occurred_at=later,
        attempts=7,
        payload=2,
        headers={"a": "b"},
        tenant_id=None,
    )
    assert (other.event_id, other.unique_key, other.occurred_at) == ("own", "again", later)
    assert (other.attempts, other.payload, other.tenant_id) == (7, 2, None)
    assert dict(other.headers) == {"a": "b"}
    assert other._id_was_given
    assert dataclasses.replace(event, deliver_after=60)._delay == 60
    assert dataclasses.replace(event, available_at=later).available_at == later
    with pytest.raises(InvalidEvent, match="event_type"):
        dataclasses.replace(event, event_type="")


def says_who() -> dict[str, str]:
    return {"user": "7"}


def test_a_delivered_event_itself_keeps_its_id_where_providers_and_modes_change_it(
    settings: Any,
) -> None:
    """Writing it again is a duplicate; it never gets a new id."""
    event = cold()
    settings.OUTBOX = {"CONTEXT_PROVIDERS": [f"{__name__}.says_who"], "MODE": "ordered"}
    with transaction.atomic(), pytest.raises(DuplicateEvent):
        outbox.write(event)
    row(event.event_id).delete()
    with transaction.atomic():
        assert outbox.write(event) == event.event_id
    found = row(event.event_id)
    assert json.loads(str(found.headers)) == {"region": "eu", "user": "7"}
    assert found.key == "shop.Order:7"
