"""The dashboard of the admin: what it shows, to whom, at what cost."""

from __future__ import annotations

import json
import re
import threading
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.utils import quote
from django.test import Client
from django.urls import reverse

import django_outbox as outbox
from django_outbox.admin import dashboard as dashboard_admin
from django_outbox.inspection import overview, queues
from django_outbox.inspection.overview import load_overview
from django_outbox.inspection.workers import clock_and_workers, missing
from django_outbox.listeners.history import Entry
from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent, OutboxPause, OutboxStatistics, OutboxWorker
from tests.browser import scene
from tests.cases import cases
from tests.table import PLACED, insert, keyed, listening, note, now, undone
from tests.test_admin import visitor
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db

URL = "admin:django_outbox_outboxstatistics_changelist"


@pytest.fixture(autouse=True)
def nothing_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_admin, "_latest", {})


def body(client: Client, page: str = "changelist", *arguments: object, **query: str) -> str:
    url = reverse(f"admin:django_outbox_outboxstatistics_{page}", args=arguments)
    response = client.get(url, query)
    assert response.status_code == 200, response
    return response.content.decode()


def part(text: str, name: str) -> str:
    """Return one section of the page, as text without markup."""
    section = text.partition(f'id="outbox-{name}"')[2].partition("</section>")[0]
    return " ".join(re.sub(r"<[^>]+>", " ", section).split())


def verdict(text: str) -> list[str]:
    found = text.partition('data-part="verdict"')[2].partition("</div>")[0]
    return [each.strip() for each in re.findall(r">([^<>]+)</(?:h2|a)>", found)]


def order(text: str) -> list[str]:
    """Return the names of the sections, in the order of the page."""
    return re.findall(r'<section [^>]*id="outbox-(\w+)"', text)


def alive(*, age: float = 1, **columns: Any) -> OutboxWorker:
    given = {
        "id": f"worker-{OutboxWorker.objects.count()}",
        "hostname": "web-1",
        "pid": 17,
        "started_at": now(),
        "heartbeat_at": now() - timedelta(seconds=age),
        "info": None,
    }
    return OutboxWorker.objects.create(**{**given, **columns})


def minute(back: int, **columns: Any) -> None:
    """Store the statistics of one worker for the minute that began ``back`` minutes ago."""
    start = now().replace(second=0, microsecond=0) - timedelta(minutes=back)
    given = {"started_at": start, "owner": "me", "listener": PLACED}
    OutboxStatistics.objects.create(**{**given, **columns})


# --- who may see it -------------------------------------------------------------------------------


def test_41_it_is_looked_at_and_nothing_else(admin_client: Client) -> None:
    assert admin_client.post(reverse(URL)).status_code == 405
    assert admin_client.head(reverse(URL)).status_code == 200
    assert admin_client.get(f"{reverse(URL)}add/").status_code == 404


@pytest.mark.parametrize("page", ["admin:index", "admin:django_outbox_outboxevent_changelist"])
def test_41_the_admin_leads_to_it(page: str) -> None:
    link = f'href="{reverse(URL)}"'
    assert link in visitor("view").get(reverse(page)).content.decode()
    apps = reverse("admin:app_list", args=["django_outbox"])
    assert link in visitor("view").get(apps).content.decode()
    assert link not in visitor().get(reverse("admin:index")).content.decode()


# --- what it says ---------------------------------------------------------------------------------


def test_41_all_is_well(admin_client: Client) -> None:
    alive()
    text = body(admin_client)
    assert verdict(text) == ["All is well"]
    assert order(text) == ["charts", "queues", "workers"]


def test_41_without_a_worker_it_says_so_first(admin_client: Client) -> None:
    insert(due=60)
    text = body(admin_client)
    assert verdict(text) == ["Events are not delivered as they should be", "No worker is alive."]
    assert order(text) == ["charts", "workers", "queues"]
    assert "outbox_worker" in part(text, "workers")


def test_41_nobody_delivers_in_writer_only_mode(admin_client: Client, settings: Any) -> None:
    """No event is late in that mode either: rows stay as they are until the purge."""
    settings.OUTBOX = {"MODE": "writer_only"}
    insert(3, due=-7200)
    assert verdict(body(admin_client)) == ["All is well"]
    settings.OUTBOX = {}
    assert "No worker is alive." in verdict(body(admin_client))
    assert any("late since" in each for each in verdict(body(admin_client)))


def test_rates_of_the_last_minutes_decide_the_verdict(admin_client: Client) -> None:
    alive()
    minute(1, done=90, dead=10)
    assert verdict(body(admin_client)) == ["All is well"]
    minute(2, dead=1, owner="another", rescued=3)
    assert verdict(body(admin_client)) == [
        "Events are not delivered as they should be",
        "Deliveries of lost workers that were rescued in the last 5 minutes: 3.",
        "11 of the 101 deliveries that ended in the last 5 minutes are dead.",
    ]
    insert(3, due=None, status=Status.DEAD, done_at=now())  # one sentence tells of the dead
    assert [each for each in verdict(body(admin_client)) if " dead" in each] == [
        "11 of the 101 deliveries that ended in the last 5 minutes are dead; most of order.placed."
    ]
    for each in (OutboxStatistics, OutboxEvent):
        each.objects.all().delete()
    minute(1, retry=2)
    assert verdict(body(admin_client))[1:] == [
        "No delivery was done in the last 5 minutes; 2 executions failed, most of order.placed."
    ]


@pytest.mark.parametrize("info", [None, "{}", "damaged"])
def test_41_a_worker_may_tell_little(admin_client: Client, info: str | None) -> None:
    alive(info=info)
    assert "web-1" in part(body(admin_client), "workers")


@pytest.mark.django_db(transaction=True)
def test_41_a_worker_shows_what_it_holds_and_runs(admin_client: Client, settings: Any) -> None:
    settings.OUTBOX = {"LEASE": 1.5, "POLL_INTERVAL": 0.2, "PROBE_INTERVAL": 0.05}
    gate: list[bool] = []

    def slow(event: outbox.Event) -> None:
        wait_until(lambda: gate, within=60)

    (event_id,) = insert()
    with listening(slow), outbox.Worker():
        try:
            wait_until(lambda: event_id in body(admin_client).partition('id="outbox-workers"')[2])
            text = part(body(admin_client), "workers")
        finally:
            gate.append(True)
    assert re.search(r"process \d+ \d s ago \d order\.placed \d s\b", text), text


def test_41_what_waits_is_counted_by_listener(admin_client: Client) -> None:
    alive()
    insert(2, due=-90, listener=PLACED)
    insert(1, due=60, event_type="order.paid", status=Status.RETRY, attempts=1)
    insert(3, due=-20, event_type="order.paid")
    text = body(admin_client)
    assert "is 1 min late since" in verdict(text)[1]
    assert verdict(text)[2:] == ["No listener here for order.paid; 3 wait."]
    found = part(text, "listeners")
    for line in ("order.paid no listener here default 3 20 s", "order.placed default 2 1 min"):
        assert line in found, found
    assert re.search(r"<dt>due now</dt><dd>5</dd>", text)
    assert 90 <= load_overview("default").lag < 120


def test_41_a_stream_that_is_due_for_long_is_late_too() -> None:
    keyed("k", due=-500)
    assert 500 <= load_overview("default").lag < 530


def test_41_more_than_is_counted_is_said_to_be(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "COUNT_LIMIT", 10)
    insert(12, due=-9)
    assert "<dt>due now</dt><dd>10+</dd>" in body(admin_client)
    monkeypatch.setattr(overview, "MAX_BLOCKED_COUNTED", 2)
    for key in "ab":
        keyed(key, due=600)
    assert "2+ keys are blocked, since" in "".join(verdict(body(admin_client)))


def test_41_the_dead_are_told_apart_by_their_cause(admin_client: Client) -> None:
    dead = {"due": None, "status": Status.DEAD, "done_at": now() - timedelta(minutes=7)}
    insert(2, last_error="ValueError: order 17 is unknown\nTraceback", **dead)
    insert(1, last_error="ValueError: order 18 is unknown", event_type="order.paid", **dead)
    insert(1, last_error="OSError: b", **dead)
    insert(1, last_error=None, event_type="order.paid", **dead)
    found = part(text := body(admin_client), "dead")
    causes = reverse("admin:django_outbox_outboxevent_groups")
    for line in (
        "ValueError order # is unknown order.placed order.paid 3 3 7 min ago",
        "OSError b",
        "– ",
    ):
        assert line in found, found
    said = [each for each in verdict(text) if each.startswith("5 deliveries are dead, 5 of them")]
    assert said and said[0].endswith("most of order.placed: ValueError: order # is unknown.")
    (link,) = re.findall(rf'href="{causes}#(cause-\w+)">ValueError', text)
    assert f'id="{link}"' in admin_client.get(causes).content.decode()
    for number in range(6):
        insert(1, last_error=f"{'ABCDEF'[number]}Error: no", **dead)
    assert "4 further causes." in part(body(admin_client), "dead")


def test_41_blocked_streams_are_shown_with_their_heads(admin_client: Client) -> None:
    keyed("k/1", 3, due=600)
    OutboxEvent.objects.filter(key="k/1", seq=1).update(
        status=Status.RETRY,
        attempts=4,
        last_error="OSError: refused\nTraceback",
        first_due_at=now() - timedelta(hours=3),
    )
    text = body(admin_client)
    assert re.search(
        r"Key k/1 is blocked, since .* \(order\.placed\): OSError: refused; ", verdict(text)[2]
    )
    found = part(text, "blocked")
    assert re.search(r"k/1 order\.placed 2 in (9|10) min OSError: refused", found), found
    assert reverse("admin:django_outbox_outboxstream_change", args=["_3Ak_2F1"]) in text


def test_41_what_is_paused_comes_right_after_the_workers(admin_client: Client) -> None:
    alive()
    OutboxPause.objects.pause("event_type", "order.paid", reason="courier down", by="ann")
    text = body(admin_client)
    said = r"Event type order\.paid has been paused since [\d :-]+ by ann: courier down\."
    assert re.fullmatch(said, verdict(text)[1])
    assert re.search(r"event type order\.paid \d s ann courier down", part(text, "held"))
    assert order(text) == ["charts", "held", "queues", "workers"]


def test_41_listeners_are_shown_with_what_they_did_lately(admin_client: Client) -> None:
    alive()
    minute(1, done=30, wait_3=10, run_0=8, run_5=2, run_ms=6000, listener="order.paid mail")
    minute(2, owner="other", done=12, listener="order.paid mail")
    minute(1, done=10, retry=50, listener="")
    found = part(body(admin_client), "listeners")
    assert re.search(r"order\.paid mail (default )?21 2[34]\.?\d* ms \d+\.?\d* ms 0\.1", found), (
        found
    )
    assert "all others" in found


def test_a_late_queue_names_who_keeps_it_busy_and_when_that_ends(admin_client: Client) -> None:
    threads = {"threads": {"default": [4, 4]}, "queues": ["default"]}
    alive(info=json.dumps(threads))
    insert(300, due=-120, made=3000, listener="order.placed")
    for back in range(1, 6):
        minute(back, done=60, run_ms=60_000, run_8=54, run_9=6, listener="order.placed")
        minute(back, done=600, run_ms=6_000, run_4=600, listener="order.paid")
    with listening(lambda event: None), listening(lambda event: None, "order.paid"):
        assert re.fullmatch(
            r"Queue default is 2 min late since [\d :-]+, 300 due: order\.placed takes 1\.8 s "
            r"\(p95\), 4 of 4 threads busy; drains in 27 s\.",
            verdict(body(admin_client))[1],
        )
        insert(4000, due=60)
        said = verdict(body(admin_client))[1]
    assert said.endswith("threads busy; 800 a minute arrive, 660 are done.")


def test_a_fresh_installation_is_told_what_to_do(admin_client: Client) -> None:
    text = body(admin_client)
    assert verdict(text) == ["Nothing has been written yet"]
    assert "outbox.write(" in text and "outbox_worker" in text
    insert(1, due=None, status=Status.DONE, done_at=now())
    assert "outbox.write(" not in body(admin_client)


# --- charts ---------------------------------------------------------------------------------------


def test_41_charts_are_lines_with_their_latest_and_highest_values(admin_client: Client) -> None:
    for owner in ("one", "two"):
        minute(3, owner=owner, done=30, retry=2)
        minute(4, owner=owner, done=60)
        minute(0, done=900, owner=owner)  # that minute is not over
    text = body(admin_client)
    found = part(text, "charts")
    assert "done 60/min highest 120/min" in found
    assert "retried 4/min highest 4/min" in found
    paths = re.findall(r'<path class="outbox-line outbox-done" d="(M[^"]+)"/>', text)
    assert paths[-1].count(",") == 2  # a point for each minute, the highest at the top
    assert ",1.00" in paths[-1]


# --- what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["a_refused_parcel", "at_three_in_the_morning"])
def test_41_it_costs_few_queries(
    admin_client: Client, setting: str, django_assert_max_num_queries: Any
) -> None:
    getattr(scene, setting)()
    with django_assert_max_num_queries(15):
        body(admin_client)


# --- lost workers ---------------------------------------------------------------------------------


def seen(number: int, *, start: float, end: float | None = None, **info: Any) -> OutboxWorker:
    """Store a worker that started ``start`` seconds ago; the last heartbeat of a lost one: end."""
    return alive(
        id=f"host-{number}-a1",
        hostname=f"host-{number}",
        age=1 if end is None else end,
        started_at=now() - timedelta(seconds=start),
        info=json.dumps(info),
    )


def missing_ids() -> list[str]:
    return [each.id for each in missing(clock_and_workers("default")[1])]


def test_a_lost_worker_is_missed_until_another_replaces_it(admin_client: Client) -> None:
    seen(1, start=9000)
    seen(2, start=9000, end=8000)
    seen(3, start=9000, end=7000)
    assert missing_ids() == ["host-3-a1", "host-2-a1"]
    text = body(admin_client)
    assert verdict(text)[0] == "Events are delivered, but something needs attention"
    lost = [re.sub(r"(\d{4}-\d\d-\d\d )?\d\d:\d\d", "…", each) for each in verdict(text)[1:]]
    assert sorted(lost) == [
        f"Worker host-{each}:17 has been lost since …; 1 of 3 expected workers run."
        for each in (2, 3)
    ]
    assert "Workers: 3 expected, 1 running, 2 lost" in part(text, "workers")
    assert "<dt>workers</dt><dd>1 of 3</dd>" in text
    seen(4, start=7500)  # started after 2 was lost, and before 3 was
    assert missing_ids() == ["host-3-a1"]
    seen(5, start=6000)
    assert missing_ids() == []
    assert verdict(body(admin_client)) == ["All is well"]


def test_one_worker_that_dies_again_and_again_is_one_worker() -> None:
    for number in range(20):
        seen(number, start=9000 - 100 * number, end=9000 - 100 * number - 50)
    assert missing_ids() == ["host-19-a1"]
    seen(20, start=10)
    assert missing_ids() == []


def test_a_worker_killed_while_it_was_stopping_is_not_missed() -> None:
    """In a rolling deploy the new one starts first; the old one may not end in time."""
    seen(1, start=9000, end=600, stopping=True)
    seen(2, start=700)
    assert missing_ids() == []


@pytest.mark.django_db(transaction=True)
def test_a_worker_that_stops_says_so_and_removes_its_row(settings: Any) -> None:
    settings.OUTBOX = {"LEASE": 30, "POLL_INTERVAL": 0.2, "PROBE_INTERVAL": 0.05}
    gate: list[bool] = []
    runs: list[bool] = []

    def slow(event: outbox.Event) -> None:
        runs.append(True)
        wait_until(lambda: gate, within=60)

    def row() -> Any:
        return json.loads(OutboxWorker.objects.get().info or "{}")

    insert()
    with listening(slow), outbox.Worker() as worker:
        wait_until(lambda: runs)
        assert "stopping" not in wait_until(lambda: OutboxWorker.objects.exists() and row())
        stops = threading.Thread(target=worker.stop)
        stops.start()
        try:
            wait_until(lambda: row().get("stopping"), what="the row of a stopping worker")
            assert clock_and_workers("default")[1][0].stopping
        finally:
            gate.append(True)
            stops.join()
    assert not OutboxWorker.objects.exists()


def lose(event_id: str, *owners: str) -> None:
    """Store what claims store that find an event of these lost workers."""
    for number, owner in enumerate(owners, start=1):
        at = now() - timedelta(seconds=100 - number)
        note(event_id, Entry(at=at, by=owner, kind="lost", number=number))
    OutboxEvent.objects.filter(pk=event_id).update(rescues=len(owners))


def test_a_lost_worker_is_shown_with_what_it_ran(admin_client: Client) -> None:
    running = [{"event_type": "order.paid", "id": "x", "seconds": 2.0}]
    seen(0, start=9000)
    seen(1, start=9000, end=600, running=running)
    assert re.search(
        r"host-1 process 17 lost, 10 min ago 0 order\.paid 10 min",
        part(body(admin_client), "workers"),
    )
    for each in insert(5):
        lose(each, "host-1-a1")
    text = body(admin_client)
    assert "lost, 10 min ago 0 order.placed and 4 more" in part(text, "workers")


def test_the_event_that_stops_its_workers_is_named(admin_client: Client) -> None:
    alive()
    minute(1, rescued=4)
    poison, neighbour, innocent = insert(3)
    lose(poison, "host-1-a1", "host-2-b2")
    lose(neighbour, "host-1-a1", "host-2-b2")
    lose(innocent, "host-1-a1")
    said = "One of 2 deliveries may stop its workers; each is tried alone now."
    assert said in verdict(body(admin_client))
    lose(poison, "host-3-c3")
    OutboxEvent.objects.filter(pk=poison).update(rescues=3)  # it was tried alone
    assert "was leased by 3 workers" in "".join(verdict(body(admin_client)))
    OutboxEvent.objects.filter(pk=neighbour).update(status=Status.DONE, available_at=None)
    text = body(admin_client)
    (said,) = (each for each in verdict(text) if poison in each)
    assert re.fullmatch(
        rf"Event {poison} \(order\.placed\) was leased by 3 workers that were lost since "
        r"\d\d:\d\d: host-1, host-2, host-3\.",
        said,
    )
    link = reverse("admin:django_outbox_outboxevent_change", args=[quote(poison)])
    assert f'<a href="{link}">{said}</a>' in text
    assert neighbour not in "".join(verdict(text))
    OutboxEvent.objects.filter(pk=poison).update(status=Status.DEAD, done_at=now(), rescues=0)
    assert not any(
        poison in each for each in verdict(body(admin_client))
    )  # now it is one dead event


# --- refresh --------------------------------------------------------------------------------------


def test_a_refresh_is_small_and_reads_once_for_all(
    admin_client: Client, django_assert_max_num_queries: Any
) -> None:
    scene.at_three_in_the_morning()
    page = admin_client.get(reverse(URL)).content
    with django_assert_max_num_queries(2):  # session and user
        fragment = body(admin_client, "refresh")
    assert len(fragment) < 30_000
    for name in ("clock", "verdict", "tiles", "charts", "tables"):
        assert fragment.count(f'data-part="{name}"') == 1
        assert page.decode().count(f'data-part="{name}"') == 1
    assert verdict(fragment) == verdict(page.decode())


def test_a_refresh_reads_again_after_some_seconds(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive()
    assert verdict(body(admin_client, "refresh")) == ["All is well"]
    OutboxWorker.objects.all().delete()
    assert verdict(body(admin_client, "refresh")) == ["All is well"]
    (known,) = dashboard_admin._latest.values()
    clock = known.read_at + dashboard_admin.MAX_STALE
    monkeypatch.setattr(dashboard_admin, "monotonic", lambda: clock)
    assert "All is well" not in verdict(body(admin_client, "refresh"))


# --- pause and resume -----------------------------------------------------------------------------


def pausing(*codenames: str) -> Client:
    """Return a client that checks CSRF tokens; its user may view events, and do this."""
    return visitor("view", *codenames, enforce_csrf_checks=True)


@pytest.mark.parametrize("may", [True, False])
def test_a_pause_leads_to_its_resume_if_the_user_may_resume(may: bool) -> None:
    OutboxPause.objects.pause("event_type", "order.paid", reason="courier down", by="ann")
    pause = OutboxPause.objects.get()
    url = reverse("admin:django_outbox_outboxpause_change", args=[pause.pk])
    client = pausing("resume_outboxpause" if may else "pause_outboxpause")
    for page in ("changelist", "refresh"):
        assert (f'<a class="button" href="{url}">Resume</a>' in body(client, page)) is may


def test_a_cause_leads_to_its_pause_if_the_user_may_pause() -> None:
    insert(1, due=None, status=Status.DEAD, done_at=now(), last_error="OSError: b")
    form = f"{reverse('admin:django_outbox_outboxpause_add')}?kind=event_type&amp;name=order.placed"
    assert form in body(pausing("pause_outboxpause"))
    assert form not in body(pausing())


@cases("page", ["changelist", "refresh"])
@undone()
def test_41_each_page_needs_the_permission_to_view_events(page: str) -> None:
    url = reverse(f"admin:django_outbox_outboxstatistics_{page}")
    assert Client().get(url)["Location"].startswith("/admin/login/")
    client = visitor("resume_outboxpause")
    assert client.get(url).status_code == 403
    assert visitor("replay").get(url).status_code == 403
    assert visitor("view", is_staff=False).get(url).status_code == 302
    assert client.post(url).status_code == 405
    assert pausing().get(url).status_code == 200
    assert pausing().post(url).status_code == 403
