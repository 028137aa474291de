"""The ``OUTBOX`` dict: its defaults and faults, table names and dotted paths."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from django_outbox.conf import Settings, current, index_name, problems, table_name
from django_outbox.queue_settings import BreakerSettings
from tests.cases import cases

DAY = 86400
SETTINGS = {each.name for each in dataclasses.fields(Settings)}

NO_NUMBER = ["5", True, math.nan, math.inf, -math.inf, 1e18, [1], -1]
NO_COUNT = [0, -1, 1.5, "5", True, None, math.nan]
NO_FLAG = [1, 0, "yes", None]
NO_PATHS = ["a.b", [1], {"a"}, None, 5]
COUNTS = """WORKERS PROCESSES ASYNC_CONCURRENCY HOT_QUEUE_CAPACITY COLD_QUEUE_CAPACITY MAX_ATTEMPTS
POLL_BATCH_SIZE PURGE_BATCH_SIZE MAX_PAYLOAD_BYTES PREFETCH_BYTES BATCH_BYTES""".split()
ABOVE_ZERO = "POLL_INTERVAL PROBE_INTERVAL LEASE LOCK_WAIT PURGE_INTERVAL STUCK_AFTER".split()
FROM_ZERO = "SKIP_RECENT DRAIN_TIMEOUT UNROUTABLE_GRACE DOORBELL_INTERVAL".split()
OPTIONAL = "RETENTION_DONE RETENTION_DEAD RETENTION_INBOX RETENTION_UNIQUE".split()
FLAGS = "ENABLED EMBEDDED SIGNAL_BRIDGE STOP_ON_FIRST_FAILURE".split()
CHOICES = "MODE ROUTE UNROUTABLE ORDERING ON_DEAD".split()
PATHS = "WRITER_HOOKS CONTEXT_PROVIDERS INTERCEPTORS REDACT".split()
NO_IDENTIFIER = ["a-b", "1a", 'a"b', "a b", "ä", "a\n", "a" * 41, 5, True, "a.b", "a;drop"]

BAD: dict[str, list[Any]] = {
    **{name: [*NO_COUNT] for name in COUNTS},
    **{name: [*NO_NUMBER, None, 0] for name in ABOVE_ZERO},
    **{name: [*NO_NUMBER, None] for name in FROM_ZERO},
    **{name: [*NO_NUMBER] for name in OPTIONAL},
    **dict.fromkeys(FLAGS, NO_FLAG),
    **{name: ["nonsense", None, 5, ["dead"]] for name in CHOICES},
    **dict.fromkeys(PATHS, NO_PATHS),
    "DEFER_LIMIT": [*NO_NUMBER, 0],
    "LISTENER_TIMEOUT": [*NO_NUMBER, 0],
    "ASYNC_CONNECTIONS": [0, -1, 1.5, "5", True],
    "RELAYS": ["orders", ["orders"], 5, {"a b": {}}, {"orders": None}, {"orders": {}}],
    "QUEUES": ["hooks", ["hooks"], 5, {"a b": {}}, {"hooks": None}, {"hooks": {"RATE": "fast"}}],
    "MAX_RESCUES": [1, 0, -1, 2.5, "5", None],
    "FAIRNESS": [(1,), (1, 2, 3), (0, 1), (2, 0), "21", 2, None, (1.5, 1)],
    "DOORBELL": [5, {}, {"directory": "x"}, ["local"], True],
    "LISTENER_MODULE": ["", None, 5, "a-b", "a.", ".a", "a b"],
    "TABLE_PREFIX": NO_IDENTIFIER,
    "SCHEMA": NO_IDENTIFIER,
    "METRICS_NAMESPACE": NO_IDENTIFIER,
}
GOOD: dict[str, list[Any]] = {
    **{name: [1, 10_000] for name in COUNTS},
    **{name: [0.001, 1, 86400.5] for name in ABOVE_ZERO},
    **{name: [0, 0.5, 60] for name in FROM_ZERO},
    **{name: [0, 1, None, 365 * DAY] for name in OPTIONAL},
    **{name: [True, False] for name in FLAGS},
    **{name: [(), [], ["a.b"], ("a", "b")] for name in PATHS},
    "MODE": ["multi_node", "single_node", "ordered", "writer_only"],
    "ROUTE": ["writer", "worker"],
    "UNROUTABLE": ["dead", "retry", "ignore"],
    "ORDERING": ["aggregate", "global"],
    "ON_DEAD": ["continue", "block"],
    "DEFER_LIMIT": [None, 1, 0.5],
    "LISTENER_TIMEOUT": [None, 1, 0.5],
    "ASYNC_CONNECTIONS": [None, 1, 50],
    "QUEUES": [
        None,
        {},
        {"hooks": {}},
        {"default": {"WORKERS": 2}},
        {f"q{n}": {} for n in range(15)},
    ],
    "MAX_RESCUES": [2, 5],
    "FAIRNESS": [(2, 1), [1, 1]],
    "DOORBELL": [None, "auto", "local", {"kind": "local", "directory": "x"}],
    "LISTENER_MODULE": ["listeners", "a.b", "_x1"],
    "TABLE_PREFIX": ["", None, "app1_", "_A9", "a" * 40],
    "SCHEMA": ["", None, "outbox"],
    "METRICS_NAMESPACE": ["outbox", "my_app"],
    "RETRY": [None, {"policy": "fixed"}, "a.b"],
    "RELAYS": [None, {}, {"orders": {"BACKEND": "a.B", "EVENTS": ["order.*"]}}],
    "SERIALIZER": [None, "a.b"],
}


def pairs(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


def test_every_setting_has_its_good_and_bad_values_here() -> None:
    assert {*GOOD} == SETTINGS
    assert {*BAD} == SETTINGS - {"RETRY", "SERIALIZER"}  # these are resolved, see test_checks


@cases("name, value", pairs(BAD))
def test_an_unfit_value_is_a_problem_that_names_it(name: str, value: Any) -> None:
    with override_settings(OUTBOX={name: value}):
        [problem] = problems()
        shown = "not valid" if name == "RELAYS" else repr(value)  # it may contain passwords
        assert problem.message.startswith(f'OUTBOX["{name}"] is {shown}; expected ')
        assert name in problem.hint
        with pytest.raises(ImproperlyConfigured, match=name):
            current()


@cases("name, value", pairs(GOOD))
def test_a_fit_value_is_in_force(name: str, value: Any) -> None:
    with override_settings(OUTBOX={name: value}):
        assert problems() == []
        assert getattr(current(), name) == value


@cases(
    ("key", "hint"),
    [
        ("LEESE", 'Did you mean "LEASE"?'),
        ("lease", 'Did you mean "LEASE"?'),
        ("RETENTION_DONNE", 'Did you mean "RETENTION_DONE"?'),
        ("WORKER", 'Did you mean "WORKERS"?'),
        ("XYZZY", "See the settings reference."),
        (5, "See the settings reference."),
    ],
)
def test_an_unknown_key_is_a_problem_with_the_nearest_name(key: Any, hint: str) -> None:
    with override_settings(OUTBOX={key: 1}):
        [problem] = problems()
        assert problem.message == f"OUTBOX[{key!r}] is not a setting."
        assert problem.hint == hint
        with pytest.raises(ImproperlyConfigured, match="is not a setting"):
            current()


@cases("value", [None, [], "x", 5], ids=repr)
def test_outbox_is_a_dict(value: Any) -> None:
    with override_settings(OUTBOX=value):
        [problem] = problems()
        assert "expected a dict" in problem.message


def test_every_fault_is_told_at_once() -> None:
    with override_settings(OUTBOX={"LEESE": 1, "WORKERS": 0, "MODE": "x"}):
        assert len(problems()) == 3
        with pytest.raises(ImproperlyConfigured, match=r"(?s)LEESE.*WORKERS.*MODE"):
            current()


def test_settings_are_read_late_once_and_again_after_a_change() -> None:
    with override_settings(OUTBOX={"WORKERS": 7}):
        assert current().WORKERS == 7
        assert current() is current()
        with override_settings(OUTBOX={"WORKERS": 8}):
            assert current().WORKERS == 8
        assert current().WORKERS == 7
    assert current().WORKERS == 4


# --- table names ----------------------------------------------------------------------------------


@cases(
    ("outbox", "name"),
    [
        ({}, "outbox_event"),
        ({"TABLE_PREFIX": "app1_"}, "app1_outbox_event"),
        ({"SCHEMA": "my"}, '"my"."outbox_event"'),
        ({"SCHEMA": "my", "TABLE_PREFIX": "app1_"}, '"my"."app1_outbox_event"'),
        ({"TABLE_PREFIX": None, "SCHEMA": ""}, "outbox_event"),
    ],
    ids=str,
)
def test_prefix_and_schema_move_the_tables(outbox: dict[str, Any], name: str) -> None:
    with override_settings(OUTBOX=outbox):
        assert table_name("outbox_event") == name


@cases("value", ['ev"; drop table ev; --', "a b", "a.b", 5, ["x"]], ids=repr)
@cases("key", ["TABLE_PREFIX", "SCHEMA"])
def test_an_unfit_name_never_reaches_a_table_name(key: str, value: Any) -> None:
    """Django's ``quote_name`` does not escape, so an unsafe name must not be used."""
    with override_settings(OUTBOX={key: value}):
        assert table_name("outbox_event") == "outbox_event"
        assert len(problems()) == 1


def test_index_names_differ_with_the_prefix_and_stay_short() -> None:
    """Index names are global in PostgreSQL and SQLite, so two prefixes need different names."""
    made = set()
    for outbox in (
        {},
        {"TABLE_PREFIX": "a_"},
        {"TABLE_PREFIX": "b_"},
        {"SCHEMA": "a_"},
        {"TABLE_PREFIX": "x" * 40},
    ):
        with override_settings(OUTBOX=outbox):
            made.add(index_name("outbox_event_unique"))
            assert len(index_name("outbox_event_unique")) <= 30
    assert len(made) == 5


# -- queues ----------------------------------------------------------------------------------------

NAMES = "expected names of 1 to 64 letters, digits, '_', '.' or '-', but not "
RATES = 'RATE as a rate such as "50/s", "100/m" or "10/h", or None, but not '
QUEUE_FAULTS: list[tuple[Any, str]] = [
    *(({name: {}}, f"{NAMES}{name!r}.") for name in ("", "a b", "-a", "ä", "x" * 65, 7)),
    (["hooks"], "expected a dict with the settings of each queue by its name, or None."),
    ({"hooks": 8}, "expected a dict of settings for the queue 'hooks', but not int."),
    ({"hooks": {"WORKERS": 0}}, "WORKERS as a whole number of at least 1, but not 0."),
    ({"hooks": {"ASYNC_CONCURRENCY": 1.5}}, "ASYNC_CONCURRENCY as a whole number of at least"),
    ({"hooks": {"ASYNC_CONNECTIONS": True}}, "of at least 1, or None, but not True."),
    ({"hooks": {"workers": 8}}, "for the queue 'hooks' only WORKERS, ASYNC_CONCURRENCY, ASYNC"),
    ({"hooks": {"workers": 8}}, "BREAKER, but not 'workers' (did you mean WORKERS?)."),
    *[
        ({"hooks": {"RATE": rate}}, f"{RATES}{rate!r}.")
        for rate in (50, "50", "0/s", "50/d", "50 / s", "-1/s", "1e3/s", "1000001/s", "/s")
    ],
    ({"hooks": {"BREAKER": True}}, 'BREAKER as a dict such as {"failures": 5, "within": 60'),
    ({"hooks": {"BREAKER": {"fails": 5}}}, "BREAKER as a dict with only failures, within, pause"),
    ({"hooks": {"BREAKER": {"failures": 0}}}, "with failures as a whole number of at least 1, but"),
    ({"hooks": {"BREAKER": {"pause": 0}}}, "with pause as a number above 0, at most a century"),
    ({"hooks": {"BREAKER": {"within": "60"}}}, "of seconds, but not '60'."),
]


@cases(("queues", "says"), QUEUE_FAULTS, ids=[str(q)[:40] for q, _ in QUEUE_FAULTS])
def test_a_fault_in_the_queues_is_named(queues: Any, says: str) -> None:
    with override_settings(OUTBOX={"QUEUES": queues}):
        [problem] = problems()
    assert problem.message.startswith('OUTBOX["QUEUES"] is ')
    assert says in problem.message
    assert problem.hint == 'Correct OUTBOX["QUEUES"] or leave it out.'


@cases(("queues", "relays"), [(16, 0), (15, 1), (0, 16)])
def test_queues_and_relays_are_sixteen_together_with_default(queues: int, relays: int) -> None:
    relay = {"BACKEND": "a.B", "EVENTS": ["x"]}
    given: dict[str, Any] = {
        "QUEUES": {f"q{number}": {} for number in range(queues)},
        "RELAYS": {f"r{number}": relay for number in range(relays)},
    }
    with override_settings(OUTBOX=given):
        [problem] = problems()
    assert "17 queues; expected at most 16" in problem.message and problem.hint
    (given["QUEUES"] or given["RELAYS"]).popitem()
    with override_settings(OUTBOX=given):
        assert problems() == []


def test_a_queue_has_the_top_level_settings_that_it_does_not_set() -> None:
    given = {
        "WORKERS": 3,
        "QUEUES": {
            "hooks": {"WORKERS": 8, "RATE": "90/m", "BREAKER": {"failures": 2}},
            "mail": {"ASYNC_CONNECTIONS": 5, "RATE": None, "BREAKER": None},
        },
    }
    with override_settings(OUTBOX=given):
        default, hooks, mail = current().queues.values()
    assert [each.name for each in (default, hooks, mail)] == ["default", "hooks", "mail"]
    assert [each.WORKERS for each in (default, hooks, mail)] == [3, 8, 3]
    assert [each.ASYNC_CONNECTIONS for each in (default, hooks, mail)] == [6, 16, 5]
    assert [each.RATE for each in (default, hooks, mail)] == [None, 1.5, None]
    found = hooks.BREAKER
    assert found == BreakerSettings(failures=2, within=60, pause=30)
    assert (default.BREAKER, mail.BREAKER) == (None, None)
