"""The dashboard of the admin: what it shows, to whom, at what cost."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.urls import reverse

import django_outbox as outbox
from django_outbox.admin.charts import PERIODS, format_value
from django_outbox.inspection import overview
from django_outbox.inspection.overview import load_overview
from django_outbox.inspection.rates import rates
from django_outbox.listeners.outcomes import Status
from django_outbox.models import (
    OutboxEvent,
    OutboxPause,
    OutboxStatistics,
    OutboxStream,
    OutboxWorker,
)
from django_outbox.models.statistics import BOUNDS, SPANS
from tests.browser import scene
from tests.plans import analyze, large_steps
from tests.table import PLACED, insert, keyed, listening, multiply, now
from tests.test_admin import visitor
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db

URL = "admin:django_outbox_outboxstatistics_changelist"


@pytest.fixture
def boss(admin_user: User) -> Client:
    client = Client()
    client.force_login(admin_user)
    return client


def body(client: Client, **query: str) -> str:
    response = client.get(reverse(URL), query)
    assert response.status_code == 200, response
    return response.content.decode()


def part(text: str, name: str) -> str:
    """Return one section of the page, as text without markup."""
    section = text.partition(f'id="outbox-{name}"')[2].partition("</section>")[0]
    return " ".join(re.sub(r"<[^>]+>", " ", section).split())


def verdict(text: str) -> list[str]:
    found = text.partition('data-part="verdict"')[2].partition("</div>")[0]
    return [each.strip() for each in re.findall(r">([^<>]+)</(?:h2|a)>", found)]


def data(text: str) -> Any:
    found = re.search(r'<script id="outbox-data" type="application/json">(.*?)</script>', text)
    assert found
    return json.loads(found[1])


def order(text: str) -> list[str]:
    """Return the names of the sections, in the order of the page."""
    return re.findall(r'<section [^>]*id="outbox-(\w+)"', text)


def alive(*, age: float = 1, **columns: Any) -> OutboxWorker:
    given = {
        "id": f"worker-{OutboxWorker.objects.count()}", "hostname": "web-1", "pid": 17,
        "started_at": now(), "heartbeat_at": now() - timedelta(seconds=age), "info": None,
    }  # fmt: skip
    return OutboxWorker.objects.create(**{**given, **columns})


def minute(back: int, **columns: Any) -> None:
    """Store the statistics of one worker for the minute that began ``back`` minutes ago."""
    start = now().replace(second=0, microsecond=0) - timedelta(minutes=back)
    given = {"span": 60, "started_at": start, "owner": "me", "event_type": PLACED}
    OutboxStatistics.objects.create(**{**given, **columns})


# --- who may see it -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codenames", "status"),
    [([], 403), (["replay"], 403), (["view"], 200), (["view", "discard"], 200)],
    ids=["nothing", "replay", "view", "both"],
)
def test_41_who_may_view_events_may_view_it(codenames: list[str], status: int) -> None:
    assert visitor(*codenames).get(reverse(URL)).status_code == status


def test_41_others_are_sent_to_the_login(client: Client) -> None:
    response = client.get(reverse(URL))
    assert (response.status_code, response["Location"].partition("?")[0]) == (302, "/admin/login/")
    assert visitor("view", is_staff=False).get(reverse(URL)).status_code == 302


def test_41_it_is_looked_at_and_nothing_else(boss: Client) -> None:
    assert boss.post(reverse(URL)).status_code == 405
    assert boss.head(reverse(URL)).status_code == 200
    assert boss.get(f"{reverse(URL)}add/").status_code == 404


@pytest.mark.parametrize("page", ["admin:index", "admin:django_outbox_outboxevent_changelist"])
def test_41_the_admin_leads_to_it(page: str) -> None:
    link = f'href="{reverse(URL)}"'
    assert link in visitor("view").get(reverse(page)).content.decode()
    apps = reverse("admin:app_list", args=["django_outbox"])
    assert link in visitor("view").get(apps).content.decode()
    assert link not in visitor().get(reverse("admin:index")).content.decode()


# --- what it says ---------------------------------------------------------------------------------


def test_41_all_is_well(boss: Client) -> None:
    alive()
    text = body(boss)
    assert verdict(text) == ["All is well"]
    assert order(text)[0] == "charts"
    assert part(text, "backlog").endswith("No events are waiting.")
    assert part(text, "dead").endswith("No event is dead.")


def test_41_without_a_worker_it_says_so_first(boss: Client) -> None:
    text = body(boss)
    assert verdict(text) == ["Events are not delivered as they should be", "No worker is alive."]
    assert order(text)[0] == "workers"
    assert "outbox_worker" in part(text, "workers")


def test_41_nobody_delivers_in_writer_only_mode(boss: Client, settings: Any) -> None:
    """No event is late in that mode either: rows stay as they are until the purge."""
    settings.OUTBOX = {"MODE": "writer_only"}
    assert verdict(body(boss)) == ["All is well"]
    insert(3, due=-7200)
    assert verdict(body(boss)) == ["All is well"]
    settings.OUTBOX = {}
    assert "No worker is alive." in verdict(body(boss))
    assert any("has waited for" in each for each in verdict(body(boss)))


def test_41_a_silent_worker_is_named(boss: Client, settings: Any) -> None:
    settings.OUTBOX = {"LEASE": 20}
    alive(age=10)
    alive(age=25, hostname="web-2")
    text = body(boss)
    assert verdict(text)[1:] == ["No heartbeat from 1 worker."]
    assert re.search(
        r"web-2 process 17 2\d s ago .* web-1 process 17 1\d s ago", part(text, "workers")
    )


def test_rates_of_the_last_minutes_decide_the_verdict(boss: Client) -> None:
    alive()
    minute(1, done=90, dead=10)
    assert verdict(body(boss)) == ["All is well"]
    minute(2, dead=1, owner="another", rescued=3)
    assert verdict(body(boss)) == [
        "Events are not delivered as they should be",
        "A worker was lost: 3 of its events were rescued in the last 5 minutes.",
        "11 of the 101 events that ended in the last 5 minutes are dead.",
    ]
    OutboxStatistics.objects.all().delete()
    minute(1, retry=2)
    assert verdict(body(boss))[1:] == [
        "No event was done in the last 5 minutes; 2 executions failed."
    ]


@pytest.mark.parametrize("info", [None, "{}", "damaged"])
def test_41_a_worker_may_tell_little(boss: Client, info: str | None) -> None:
    alive(info=info)
    assert "web-1" in part(body(boss), "workers")


@pytest.mark.django_db(transaction=True)
def test_41_a_worker_shows_what_it_holds_and_runs(admin_user: User, settings: Any) -> None:
    settings.OUTBOX = {"LEASE": 1.5, "POLL_INTERVAL": 0.2, "PROBE_INTERVAL": 0.05}
    client = Client()
    client.force_login(admin_user)
    gate: list[bool] = []

    def slow(event: outbox.Event) -> None:
        wait_until(lambda: gate, within=60)

    (event_id,) = insert()
    with listening(slow), outbox.Worker():
        try:
            wait_until(lambda: event_id in body(client).partition('id="outbox-workers"')[2])
            text = part(body(client), "workers")
        finally:
            gate.append(True)
    assert re.search(r"\b1 order\.placed \d s\b", text), text


def test_41_what_waits_is_counted_by_type(boss: Client) -> None:
    alive()
    insert(2, due=-90)
    insert(1, due=60, event_type="order.paid", status=Status.RETRY, attempts=1)
    insert(4, due=60, event_type="order.paid")
    insert(3, due=20, event_type="order.paid", locked_by="worker-0", locked_at=now())
    keyed("k", 5, event_type="order.kept")
    text = body(boss)
    assert verdict(text)[1] == "The oldest due event has waited for 1 min."
    found = part(text, "backlog")
    for line in ("order.paid 3 1 4", "order.kept 5", "order.placed 2 1 min"):
        assert line in found
    seen = load_overview("default").backlog
    assert seen.is_whole
    assert seen.due == 7
    assert 90 <= seen.lag < 120


def test_41_a_stream_that_is_due_for_long_is_late_too() -> None:
    keyed("k", due=-500)
    assert 500 <= load_overview("default").backlog.lag < 530


def test_41_more_than_is_counted_is_said_to_be(
    boss: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "MAX_EVENTS", 10)
    monkeypatch.setattr(overview, "MAX_DEAD", 3)
    insert(9)
    insert(3, due=None, status=Status.DEAD, done_at=now(), last_error="ValueError: no")
    text = body(boss)
    assert "ounted are" not in text
    insert(1)
    insert(1, due=None, status=Status.DEAD, done_at=now(), last_error="ValueError: no")
    text = body(boss)
    assert "There are more: only those due first are counted." in part(text, "backlog")
    assert "Only the newest 3 dead events are counted." in part(text, "dead")
    assert "3+ events are dead." in verdict(text)


def test_41_the_dead_are_told_apart_by_their_cause(boss: Client) -> None:
    dead = {"due": None, "status": Status.DEAD, "done_at": now() - timedelta(minutes=7)}
    insert(2, last_error="ValueError: a\nTraceback", **dead)
    insert(1, last_error="OSError: b", **dead)
    insert(1, last_error=None, event_type="order.paid", **dead)
    shared = {
        "order.shared a": {"state": "dead", "error": "KeyError: x"},
        "order.shared b": {"state": "done"},
    }
    insert(1, event_type="order.shared", progress=json.dumps(shared), **dead)
    text = body(boss)
    found = part(text, "dead")
    for line in ("order.placed ValueError 2 7 min ago", "order.placed OSError 1", "order.paid 1",
                 "order.shared order.shared a KeyError 1"):  # fmt: skip
        assert line in found, found
    assert "order.shared b" not in found
    assert "5 events are dead." in verdict(text)
    events = reverse("admin:django_outbox_outboxevent_changelist")
    link = f"{events}?event_type=order.paid&amp;state=dead"
    assert link in text
    assert boss.get(link.replace("&amp;", "&")).status_code == 200


def test_41_blocked_streams_are_shown_with_their_heads(boss: Client) -> None:
    keyed("k/1", 3, due=600)
    OutboxEvent.objects.filter(key="k/1", seq=1).update(
        status=Status.RETRY, attempts=4, last_error="OSError: refused\nTraceback",
        first_due_at=now() - timedelta(hours=3),
    )  # fmt: skip
    text = body(boss)
    assert "1 stream is blocked." in verdict(text)
    found = part(text, "blocked")
    assert re.search(r"k/1 order\.placed 4 (3|2) h ago 3 in (9|10) min OSError: refused", found), (
        found
    )
    assert reverse("admin:django_outbox_outboxstream_change", args=["k_2F1"]) in text


def test_41_what_is_paused_comes_right_after_the_workers(boss: Client) -> None:
    alive()
    OutboxPause.objects.pause("event_type", "order.paid", reason="courier down", by="ann")
    text = body(boss)
    assert verdict(text)[1:] == ["1 pause is active."]
    assert re.search(r"event type order\.paid \d s ann courier down", part(text, "paused"))
    assert order(text)[:3] == ["workers", "paused", "charts"]


def test_41_event_types_without_a_listener_and_those_who_listen(boss: Client) -> None:
    alive()
    insert(2)
    insert(1, due=None, event_type="order.old", status=Status.DONE, done_at=now())
    with listening(lambda event: None, "order.paid", name="mail", timeout=5):
        text = body(boss)
    assert "order.placed __GLOBAL__ 2 2" in part(text, "unrouted")
    assert "order.old __GLOBAL__ 1" in part(text, "unrouted")
    assert "1 event type has no listener." in verdict(text)
    assert re.search(r"order\.paid \* mail \S+lambda\S+ timeout 5 s", part(text, "listeners"))


# --- charts ---------------------------------------------------------------------------------------


def test_41_charts_are_data_for_the_script_and_text_for_people(boss: Client) -> None:
    for owner in ("one", "two"):
        minute(3, owner=owner, done=30, retry=2, wait_3=10, run_0=8, run_5=2)
        minute(3, owner=owner, event_type="", lag=2.5 if owner == "one" else 0.1)
    found = data(text := body(boss))
    assert len(found["times"]) == PERIODS["1h"].steps
    assert found["zone"] == "Asia/Kathmandu"
    charts = {each["name"]: each for each in found["charts"]}
    at = found["times"].index(
        (now().replace(second=0, microsecond=0) - timedelta(minutes=3)).timestamp()
    )

    def value(chart: str, line: int = 0) -> Any:
        return charts[chart]["series"][line]["values"][at]

    assert value("throughput") == 60
    assert [value("failures", line) for line in range(4)] == [4, 0, 0, 0]
    assert BOUNDS[2] < value("wait") < value("wait", 1) < value("wait", 2) <= BOUNDS[3]
    assert value("run") == pytest.approx(0.00125)
    assert (value("lag"), value("workers")) == (2.5, 2)
    assert charts["throughput"]["series"][0]["values"][at - 1] is None  # no worker ran
    assert "done 60/min highest 60/min" in part(text, "charts")
    assert text.count('<th scope="row">20') == PERIODS["1h"].steps


@pytest.mark.parametrize(("name", "span"), [("1h", 60), ("24h", 600), ("7d", 3600), ("x", 60)])
def test_41_each_period_reads_rows_of_its_own(boss: Client, name: str, span: int) -> None:
    for each in SPANS:
        start = (now().timestamp() - 2 * each) // each * each
        minute(0, span=each, done=each, started_at=datetime.fromtimestamp(start, timezone.utc))
    text = body(boss, period=name)
    done = data(text)["charts"][0]["series"][0]["values"]
    assert [each for each in done if each] == [60]
    assert text.count('aria-current="true"') == 1
    assert f"order.placed {span}" in part(text, "types")


def test_41_a_minute_that_is_not_over_is_not_shown(boss: Client) -> None:
    minute(0, done=30)
    assert {*data(body(boss))["charts"][0]["series"][0]["values"]} == {None}


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "seconds", "–"),
        (0, "seconds", "0 s"),
        (0.00431, "seconds", "4.3 ms"),
        (0.312, "seconds", "312 ms"),
        (1.26, "seconds", "1.3 s"),
        (59.4, "seconds", "59 s"),
        (185, "seconds", "3 min"),
        (0.14, "rate", "0.14/min"),
        (1234.5, "rate", "1234/min"),
        (3, "count", "3"),
    ],
)
def test_a_value_has_the_digits_that_matter(value: float | None, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", "</script><b>", "'\"&"])
def test_markup_is_escaped_everywhere(boss: Client, hostile: str) -> None:
    alive(hostname=hostile, info=json.dumps({"running": [
        {"event_type": hostile, "event_id": hostile, "seconds": 1}
    ]}))  # fmt: skip
    minute(2, done=1, event_type=hostile)
    insert(1, event_type=hostile, aggregate_type=hostile)
    insert(1, due=None, event_type=hostile, status=Status.DEAD, done_at=now(), last_error=hostile)
    keyed(hostile, 2, due=600, event_type=hostile)
    OutboxEvent.objects.filter(key=hostile).update(last_error=hostile)
    with listening(lambda event: None, hostile.replace("*", ""), name=hostile):
        text = body(boss)
    assert hostile not in text.replace("</script>\n", "")
    assert text.count("<script") == text.count("</script>")


# --- what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["a_refused_parcel", "at_three_in_the_morning"])
def test_41_it_costs_few_queries(
    boss: Client, setting: str, django_assert_max_num_queries: Any
) -> None:
    getattr(scene, setting)()
    with django_assert_max_num_queries(23):
        body(boss)


@pytest.mark.django_db(transaction=True)  # MariaDB's ANALYZE commits
def test_41_every_look_uses_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 5,000 rows, half of them with a key, and 50 of each kind that a query selects."""
    monkeypatch.setattr(overview, "DEAD_SCAN_LIMIT", 100)
    clock = now()
    done = {"due": None, "status": Status.DONE, "done_at": clock}
    insert(2400, **done)
    insert(2400, key="old", seq=1, **done)
    insert(50, due=None, status=Status.DEAD, done_at=clock, last_error="ValueError: no")
    insert(50)
    for number in range(25):
        keyed(f"k{number}", 2, due=-5 if number % 2 else 600)
    multiply(OutboxStream(key="idle", seq=1), [f"idle{n}" for n in range(2000)])
    OutboxStatistics.objects.bulk_create(
        OutboxStatistics(span=span, started_at=clock - timedelta(seconds=span * back),
                         owner="me", event_type=PLACED, done=1)
        for span in SPANS for back in range(1500)
    )  # fmt: skip
    for model in (OutboxEvent, OutboxStream, OutboxStatistics):
        analyze(model)
    works: dict[str, Callable[[], object]] = {
        "backlog": lambda: overview._backlog("default", clock),
        "dead": lambda: overview._dead("default"),
        "blocked": lambda: overview._blocked("default"),
        "rates": lambda: rates("default", clock),
    }
    steps = large_steps(works)
    # MariaDB's plan does not show that a LIMIT ends a scan of the primary key.
    walks = [each for each in steps.pop("dead", []) if each.get("key") == "PRIMARY"]
    assert all(each["type"] == "index" for each in walks)
    assert not any("filesort" in each["Extra"] for each in walks)
    assert len(walks) <= 2 * (connection.vendor == "mysql")
    assert steps == {}


def test_41_where_no_index_has_the_dead_of_streams_the_newest_events_are_read(
    boss: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "DEAD_SCAN_LIMIT", 5)
    dead = {"due": None, "status": Status.DEAD, "done_at": now(), "last_error": "ValueError: no"}
    insert(1, key="old", seq=1, **dead)
    insert(2, **dead)
    insert(4, due=None, status=Status.DONE, done_at=now())
    insert(1, key="new", seq=1, **dead)
    is_partial = connection.vendor == "mysql"
    assert load_overview("default").dead.count == (3 if is_partial else 4)
    assert ("Of events with a key, only the newest" in body(boss)) == is_partial
