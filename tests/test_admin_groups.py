"""Dead events by type and error: what the dead died of, and their replay as one."""

from __future__ import annotations

import html
import json
import re
from datetime import timedelta

import pytest
from django.urls import reverse

from django_outbox.admin import state_filter
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests.table import now
from tests.test_admin import EVIL, all_url, body, listed, make, said, say_yes, traces, visitor

pytestmark = pytest.mark.django_db

GROUPS = "admin:django_outbox_outboxevent_groups"


def test_the_dead_stand_in_groups_largest_first_and_a_group_is_replayed() -> None:
    """By type and class of error, with age of the newest and oldest; nobody else is touched."""
    clock = now()
    refused = [
        make(last_error=f"OSError: refused {n}\nTraceback", done_at=clock - timedelta(hours=n + 1))
        for n in range(3)
    ]
    others = [
        make(last_error="OSErrors: other"),
        make(last_error="KeyError", event_type="x"),
        make(last_error=None),
        make(Status.RETRY, last_error="OSError: refused"),
    ]
    client = visitor("view", "replay")
    page = body(client, reverse(GROUPS))
    rows = re.findall(r"<tr>\s*<td class=.outbox-count.>(.*?)</tr>", page, re.DOTALL)
    assert [row.partition("<")[0] for row in rows] == ["3", "1", "1", "1"]
    for part in ("order.placed", "OSError", "refused 2", "1 h ago", "3 h ago"):
        assert part in rows[0]
    links = [html.unescape(each) for each in re.findall(r'href="([^"]+)"', rows[0])]
    assert len(listed(client, state="dead", event_type="order.placed", error="OSError")) == 3
    assert len(listed(client, state="dead", error="")) == 1
    [url] = [each for each in links if each.startswith(all_url("replay"))]
    asked = client.get(url)
    assert "Replay 3 events?" in asked.content.decode()
    assert said(say_yes(client, asked)) == "3 events were replayed."
    assert [pk for pk, _ in traces()] == [each.pk for each in refused]
    assert OutboxEvent.objects.dead().count() == len(others) - 1


def test_a_group_names_the_listeners_that_gave_up() -> None:
    progress = {"order.placed mail": {"state": "dead"}, "order.placed stock": {"state": "done"}}
    make(progress=json.dumps(progress))
    page = body(visitor("view"), reverse(GROUPS))
    assert "order.placed mail" in page
    assert "order.placed stock" not in page
    assert "Replay" not in page  # without the permission


def test_groups_are_of_the_newest_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No event is dead." in body(visitor("view"), reverse(GROUPS))
    for _ in range(4):
        make()
    monkeypatch.setattr(state_filter, "SCAN_LIMIT", 3)
    assert "Only the newest 3 dead events were searched." in body(visitor("view"), reverse(GROUPS))


def test_groups_are_seen_by_permission_and_escaped() -> None:
    make(last_error=EVIL, event_type=EVIL, progress=json.dumps({EVIL: {"state": "dead"}}))
    assert visitor().get(reverse(GROUPS)).status_code == 403
    page = body(visitor("view", "replay"), reverse(GROUPS))
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    for error in ("a\0b", "%", "_", "\\", "'"):
        query = {"state": "dead", "error": error}
        assert visitor("view").get("/admin/django_outbox/outboxevent/", query).status_code in (
            200,
            302,
        )
