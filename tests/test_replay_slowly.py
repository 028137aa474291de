"""Slow replays by the command and in the admin."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError
from django.test import Client
from django.urls import reverse

import django_outbox as outbox
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxOperation, OutboxStream
from django_outbox.models.replay import Spacing
from tests.surroundings import printed
from tests.table import dead, histories, history, keyed, listening, now, row, stream_due_in

pytestmark = pytest.mark.django_db(transaction=True)


MINUTE, SECOND = timedelta(minutes=1), timedelta(seconds=1)
ALL = "admin:django_outbox_outboxevent_replay_all"

LIST = "admin:django_outbox_outboxevent_changelist"


@pytest.mark.parametrize("rate", ["", "100", "0/m", "100/d", "-1/s", "1/m "])
def test_another_rate_is_refused(rate: str) -> None:
    dead()
    with pytest.raises(ValueError, match='expected one such as "50/s", "100/m", "10/h"'):
        OutboxEvent.objects.dead().replay(rate=rate)
    assert OutboxEvent.objects.dead().count() == 1


# -- the command -----------------------------------------------------------------------------------


run = partial(printed, "outbox_replay")


def test_the_command_replays_slowly() -> None:
    ids = sorted(dead(5))
    out = run("--all", "--rate", "10/m", "--limit", "4", "--by", "ada")
    found = times(ids[:4])
    assert steps(found) == {6 * SECOND}
    assert out == f"replayed 4; the last is due at {found[-1].isoformat(' ', 'seconds')}"
    assert row(ids[4]).status == Status.DEAD
    assert {each.by for each in histories() if each.kind == "replayed"} == {"ada"}
    run(ids[4])
    assert history(ids[4])[-1].by not in ("", "ada")  # the system's user


def test_the_command_refuses_another_rate() -> None:
    with pytest.raises(CommandError, match="'100' is not a rate; expected, for example, 50/s"):
        run("--all", "--rate", "100")


# -- the admin -------------------------------------------------------------------------------------


@pytest.fixture
def boss(admin_user: User) -> Client:
    client = Client()
    client.force_login(admin_user)
    return client


def fields(page: Any) -> list[str]:
    return re.findall(r'name="(rate|limit)"', page.content.decode())


def said(response: Any) -> str:
    from django.contrib.messages import get_messages

    return " ".join(str(each) for each in get_messages(response.wsgi_request))


def ticked(client: Client, ids: list[str], **more: str) -> Any:
    data = {"action": "replay", "_selected_action": ids, "index": "0", **more}
    if more:
        data |= {"outbox_event": ids, "outbox_confirmed": "yes"}
    return client.post(reverse(LIST), data)


def test_the_confirmation_offers_a_rate_for_several_events(boss: Client) -> None:
    several, (one,) = dead(2), dead()
    assert fields(ticked(boss, several)) == ["rate"]
    assert fields(boss.get(reverse(ALL))) == ["rate", "limit"]
    assert fields(ticked(boss, [one])) == []
    discard = reverse("admin:django_outbox_outboxevent_discard_all")
    assert fields(boss.get(discard)) == ["limit"]


def test_the_confirmation_says_how_long_a_rate_takes(boss: Client) -> None:
    dead(300)
    page = boss.get(reverse(ALL)).content.decode()
    assert "100/m: 3 min" in page
    assert "10/s: 30 s" in page


def test_ticked_events_are_replayed_slowly(boss: Client) -> None:
    ids = sorted(dead(3))
    response = ticked(boss, ids[::-1], rate="100/m")
    assert "3 deliveries were replayed. They are due one after the other, the last at " in said(
        response
    )
    assert steps(times(ids)) == {timedelta(seconds=0.6)}


def test_ticked_events_are_left_alone_at_another_rate(boss: Client) -> None:
    page = ticked(boss, sorted(dead(2)), rate="x")
    assert page.status_code == 200
    assert 'class="errorlist"' in page.content.decode()
    assert OutboxEvent.objects.dead().count() == 2
    assert not OutboxOperation.objects.exists()


def dead_in_stream(key: str, count: int) -> list[str]:
    ids = keyed(key, count, status=Status.DEAD, done_at=now(), last_error="E: no")
    OutboxStream.objects.update(due_at=None)
    return ids


def times(ids: list[str]) -> list[datetime]:
    found = [row(each).available_at for each in ids]
    assert None not in found
    return [each for each in found if each is not None]


def steps(found: list[datetime]) -> set[timedelta]:
    return {later - earlier for earlier, later in pairwise(found)}


def test_the_ten_first_are_a_slice() -> None:
    ids = sorted(dead(12))
    rows = OutboxEvent.objects.dead().order_by("pk")[:10]
    assert rows.replay(rate="1/m") == 10
    assert steps(times(ids[:10])) == {MINUTE}
    assert {*OutboxEvent.objects.dead().values_list("pk", flat=True)} == {*ids[10:]}


def test_events_of_a_stream_wait_for_their_time_and_keep_their_order() -> None:
    got: list[str] = []
    with listening(lambda event: got.append(event.event_id)):
        first, second = dead_in_stream("k", 2)
        (behind,) = keyed("k")
        assert OutboxEvent.objects.dead().replay(rate="1/m") == 2
        outbox.drain()
        assert got == [first]
        assert 50 < stream_due_in("k") <= 60
        deliver_at = row(second).deliver_at
        assert deliver_at is not None
        assert row(second).first_due_at == deliver_at
        OutboxEvent.objects.filter(pk=second).update(deliver_at=now() - SECOND)
        OutboxStream.objects.update(due_at=now())
        outbox.drain()
    assert got == [first, second, behind]


def test_a_spacing_that_was_interrupted_makes_no_burst() -> None:
    """What was not replayed meanwhile is not caught up."""
    late = now()
    spacing = Spacing("1/m", start=late - timedelta(days=1))
    assert spacing.take(2, late) == [late, late + MINUTE]
    assert spacing.last_at == late + MINUTE
    assert spacing.take(1, late) == [late + 2 * MINUTE]
    assert spacing.take(0, late) == []
