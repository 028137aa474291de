"""``outbox_dead``: dead events by cause, one event whole, export, discard, skip."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest
from django.core.management import CommandError

from django_outbox.listeners.outcomes import Status
from django_outbox.models import OutboxEvent
from tests.surroundings import printed
from tests.table import PLACED, dead, insert, keyed, listening, row, siblings, write

pytestmark = pytest.mark.django_db(transaction=True)

DEAD, NEW = Status.DEAD, Status.NEW
run, replay = partial(printed, "outbox_dead"), partial(printed, "outbox_replay")
LEFT = "of the given ids are unknown or not dead"


def ids_of(*arguments: str) -> list[str]:
    """Return the ids of the rows that are printed as JSON lines."""
    return [json.loads(each)["id"] for each in run(*arguments).split("\n")]


def refused(*arguments: str) -> str:
    with pytest.raises(CommandError) as raised:
        run(*arguments)
    assert raised.value.returncode == 1
    return str(raised.value)


# --- list -----------------------------------------------------------------------------------------


def test_dead_events_are_counted_by_cause() -> None:
    dead(2, "ValueError: order 17 is unknown")
    (last,) = dead(1, "ValueError: order 18 is unknown\nTraceback", event_type="parcel.requested")
    dead(1, "requests.Timeout: 5 s", event_type="parcel.requested")
    dead(1, None, event_type="parcel.requested")
    insert(4)
    found = json.loads(run("list", "--format", "json"))
    assert [(each["count"], each["title"]) for each in found] == [
        (3, "ValueError: order # is unknown"),
        (1, ""),
        (1, "requests.Timeout: # s"),
    ]
    assert found[0]["event_types"] == {"order.placed": 2, "parcel.requested": 1}
    assert found[0]["id"] == last
    lines = run("list").splitlines()
    assert lines[0].split()[:4] == ["COUNT", "TITLE", "EVENT", "TYPES"]
    assert lines[1].split()[:5] == ["3", "ValueError:", "order", "#", "is"]
    assert "order.placed 2, parcel.requested 1" in lines[1]
    assert lines[1].endswith(f"{last}  {found[0]['cause']}")
    assert run("list", "--limit", "2").endswith("\nfurther causes: 1; show more with --limit")


def test_a_cause_is_listed_exported_discarded_and_replayed_alone() -> None:
    one = [dead(1, f"ValueError: order {n}")[0] for n in (1, 2, 3)]
    other, *_ = dead(2, "ValueErrors: order 1")
    [cause] = json.loads(run("list", "--error", "ValueError:", "--format", "json"))
    name = cause["cause"]
    assert [
        each["cause"] for each in json.loads(run("list", "--cause", name, "--format=json"))
    ] == [name]
    assert ids_of("export", "--cause", name) == one
    assert run("discard", "--cause", name, "--dry-run") == "would discard 3"
    assert run("discard", one[0], other, "--cause", name) == f"discarded 1; 1 {LEFT}"
    assert replay("--cause", name, "--limit", "1") == "replayed 1"
    assert replay("--cause", name) == "replayed 1"
    assert OutboxEvent.objects.dead().count() == 2
    assert run("list", "--cause", name) == "No event is dead."
    assert "is not a cause" in refused("list", "--cause", "ValueError")


def test_the_list_takes_the_filters_of_the_replay() -> None:
    dead(2)
    dead(1, "KeyError: 'a'", tenant_id="acme")
    for chosen in (
        ["--error", "KeyError"],
        ["--tenant", "acme"],
        ["--since", "2m", "--error", "K"],
    ):
        assert [each["count"] for each in json.loads(run("list", *chosen, "--format=json"))] == [1]
    assert run("list", "--key", "nobody's") == "No event is dead."


def test_each_listener_of_a_cause_is_listed_and_can_be_chosen_alone() -> None:
    """Also if its deliveries are not the newest."""
    mail, post = f"{PLACED} mail", f"{PLACED} post"
    ids = siblings(*dead(1, listener=PLACED), mail, post)
    siblings(*dead(1, listener=PLACED), mail)
    [cause] = json.loads(run("list", "--format=json"))
    assert (cause["count"], cause["listeners"]) == (5, [PLACED, mail, post])
    [cause] = json.loads(run("list", "--listener", mail, "--format=json"))
    assert (cause["count"], cause["listeners"]) == (2, [mail])
    assert json.loads(run("export", "--listener", post))["id"] == ids[2]
    assert run("discard", "--listener", mail, "--since", "1h", "--dry-run") == "would discard 2"
    assert run("list", "--listener", "mail") == "No event is dead."  # titles are compared whole
    assert "--all cannot be combined" in refused("discard", "--all", "--listener", mail)


# --- ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("typed", [str, str.lower])
def test_an_events_id_means_all_its_deliveries_and_a_rows_own_id_only_that_one(
    typed: Callable[[str], str],
) -> None:
    rows = siblings(*dead(1, listener=PLACED), f"{PLACED} mail", f"{PLACED} post")
    other = f"{rows[0]}0"  # of another event, whose id begins alike
    dead(1, event_id=other)
    event_id, mail, post = map(typed, rows)
    show = partial(ids_of, "show", "--format=json")
    assert show(event_id) == show(event_id, post, event_id) == sorted(rows)
    assert show(mail) == [rows[1]]
    assert ids_of("export", event_id) == sorted(rows)
    assert replay(mail) == "replayed 1"
    assert [row(each).status for each in rows] == [DEAD, NEW, DEAD]
    assert replay(event_id, mail, "unknown", "--dry-run") == f"would replay 2; 2 {LEFT}"
    assert replay(event_id, post, "--limit", "1") == "replayed 1"
    assert run("discard", event_id, mail) == f"discarded 1; 1 {LEFT}"
    assert refused("discard", event_id).startswith("discarded 0; 1 of the given ids")
    assert row(other).status == DEAD


def test_more_ids_than_a_statement_takes_conditions() -> None:
    ids = dead(250)
    assert replay(*ids, "unknown", *ids, *map(str.lower, ids)) == f"replayed 250; 1 {LEFT}"


def test_an_event_is_skipped_in_each_of_its_streams_and_a_delivery_in_its_own() -> None:
    calls = [lambda event, name=name: None for name in ("", "mail", "post")]
    with listening(calls[0]), listening(calls[1], name="mail"), listening(calls[2], name="post"):
        (event_id,) = write(key="k")
    rows = {str(each.stream): each.pk for each in OutboxEvent.objects.of_event(event_id)}
    assert {*rows} == {":k", "mail:k", "post:k"}
    assert run("skip", rows["mail:k"]) == "skipped 1"
    assert {each.stream for each in OutboxEvent.objects.dead()} == {"mail:k"}
    assert run("skip", event_id.lower()) == "skipped 2"
    assert OutboxEvent.objects.dead().count() == 3
    assert refused("skip", event_id).startswith("skipped 0; 1 of the given ids")


# --- show and export ------------------------------------------------------------------------------


def test_everything_about_an_event_is_shown() -> None:
    (event_id,) = dead(1, "ValueError: no\n  File x", tenant_id="acme")
    text = run("show", event_id)
    for part in (event_id, "DEAD", "order.placed", "acme", "File x", "attempts       3"):
        assert part in text
    assert "locked_by" not in text  # it has none
    found = json.loads(run("show", event_id, "--format", "json"))
    assert (found["event_id"], found["status"]) == (event_id, "DEAD")
    assert "ids of stored events" in refused("show", event_id, "nowhere")


def test_an_export_has_a_line_for_each_event_with_its_exact_payload() -> None:
    first, second = dead(2)
    text = '{"price":\n 12345678901234567890.10, "a": "ü\u2028"}'
    OutboxEvent.objects.filter(pk=first).update(payload=text)
    OutboxEvent.objects.filter(pk=second).update(payload="not\nJSON", headers='{"b": 1}')
    insert(1)
    lines = run("export", "--all").split("\n")
    assert [json.loads(each)["event_id"] for each in lines] == [first, second]
    assert '"payload": {"price":  12345678901234567890.10, "a": "ü\u2028"}' in lines[0]
    assert json.loads(lines[1])["payload"] == "not\nJSON"
    assert json.loads(lines[1])["headers"] == {"b": 1}
    assert json.loads(lines[0])["done_at"].endswith("Z")
    assert run("export", second).count("\n") == 0
    assert "--all" in refused("export")


# --- discard and skip -----------------------------------------------------------------------------


def test_dead_events_are_discarded_for_good() -> None:
    first, second, third = dead(3)
    (waits,) = insert(1)
    assert run("discard", first, "--dry-run") == "would discard 1"
    assert row(first).status == DEAD
    assert run("discard", first, waits) == (
        "discarded 1; 1 of the given ids are unknown or not dead"
    )
    assert {*OutboxEvent.objects.values_list("pk", flat=True)} == {second, third, waits}
    assert refused("discard", waits).startswith("discarded 0; 1 of the given ids")
    assert "Expected ids, a filter, or --all" in refused("discard")
    assert "cannot be combined" in refused("discard", "--all", "--error", "x")
    assert run("discard", "--error", "ValueError") == "discarded 2"


def test_an_event_that_blocks_its_stream_is_skipped() -> None:
    first, second = keyed("k", 2, due=600)
    (free,) = insert(1)
    assert run("skip", first, free).startswith(
        "skipped 1; 1 of the given ids are unknown, finished"
    )
    assert (row(first).status, row(second).status, row(free).status) == (DEAD, NEW, NEW)
    assert refused("skip", first).startswith("skipped 0; 1 of the given ids")
