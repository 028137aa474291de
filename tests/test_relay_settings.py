"""``OUTBOX["RELAYS"]``: what its values may be, and what the system checks say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.core.checks import CheckMessage, run_checks
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from django.utils.module_loading import import_string

from django_outbox import conf
from django_outbox.checks.relays import EXTRAS
from django_outbox.listeners import registry
from django_outbox.relay_settings import FIELDS, relays_fault
from django_outbox.relays import Backend
from tests.cases import cases

IN_MEMORY = "tests.relay_backend.InMemory"
GOOD = {"BACKEND": IN_MEMORY, "EVENTS": ["order.*"]}
SECRET = "https://user:hunter2@broker.example/hook?token=hunter2"


def fault(**relay: Any) -> str | None:
    return relays_fault({"orders": {**GOOD, **relay}})


def checked(relays: Any, **others: Any) -> list[CheckMessage]:
    with override_settings(OUTBOX={"RELAYS": relays, **others}):
        found = run_checks(tags=["django_outbox"])
    return [each for each in found if (each.id or "").startswith("django_outbox")]


def checked_relay(others: Any = None, **relay: Any) -> list[CheckMessage]:
    return checked({"orders": {**GOOD, **relay}}, **(others or {}))


@cases(
    ("value", "expected"),
    [
        ([], "a dict with the settings of each relay"),
        ("orders", "a dict with the settings of each relay"),
        ({1: GOOD}, "letters, digits, '_' or '-', but not 1"),
        ({"": GOOD}, "but not ''"),
        ({"a.b": GOOD}, "but not 'a.b'"),
        ({"-a": GOOD}, "but not '-a'"),
        ({"a" * 51: GOOD}, "names of 1 to 50"),
        ({"a": None}, "for the relay 'a', but not NoneType"),
        ({"a": SECRET}, "for the relay 'a', but not str"),
        ({"a": {"EVENTS": ["x"]}}, "BACKEND for the relay 'a'"),
        ({"a": {"BACKEND": IN_MEMORY}}, "EVENTS for the relay 'a'"),
        ({"a": {**GOOD, "TOPIC": "x"}}, "but not 'TOPIC'"),
        ({"a": {**GOOD, "FORMATS": "x"}}, "did you mean FORMAT?"),
        ({"a": {"BACKEND": IN_MEMORY, "EVENTS": ["x"], 5: "x"}}, "but not 5"),
        ({"a": {**GOOD, "name": "x"}}, "but not 'name'"),
    ],
    ids=str,
)
def test_of_the_whole_setting(value: Any, expected: str) -> None:
    assert expected in (relays_fault(value) or "")


@cases("value", [None, {}, {"a": GOOD}, {"a-b_C1": GOOD}, {"a" * 50: GOOD}], ids=str)
def test_of_the_whole_setting_that_fits(value: Any) -> None:
    assert relays_fault(value) is None


WRONG: list[tuple[str, Any, str]] = [
    ("BACKEND", None, "dotted path"),
    ("BACKEND", "Kafka", "dotted path"),
    ("BACKEND", ".", "dotted path"),
    ("BACKEND", "..Kafka", "dotted path"),
    ("BACKEND", "a b.Kafka", "dotted path"),
    ("BACKEND", Backend, "dotted path"),
    ("EVENTS", "order.*", "a list of event types"),
    ("EVENTS", b"order.*", "a list of event types"),
    ("EVENTS", None, "a list of event types"),
    ("EVENTS", {"order.*"}, "a list of event types"),
    ("EVENTS", 5, "a list of event types"),
    ("EVENTS", [], "it is empty"),
    ("EVENTS", (), "it is empty"),
    ("EVENTS", ["order.*", 5], "but not 5"),
    ("EVENTS", ("order.*", None), "but not None"),
    ("EVENTS", [["order.*"]], "but not ['order.*']"),
    ("EVENTS", [b"x"], "but not b'x'"),
    ("EVENTS", [""], "but not ''"),
    ("EVENTS", ["x" * 129], "1 to 128 characters"),
    ("TO", "", "an empty text"),
    ("TO", None, "NoneType"),
    ("TO", 5, "int"),
    ("TO", ["{event_type}"], "list"),
    ("TO", "{", "it is not one"),
    ("TO", "}", "it is not one"),
    ("TO", "{event_type", "it is not one"),
    ("TO", "{headers[a}", "it is not one"),
    ("TO", "{}", "but not {}"),
    ("TO", "{0}", "but not {0}"),
    ("TO", "{ event_type}", "but not { event_type}"),
    ("TO", "{payload}", "but not {payload}"),
    ("TO", "{event}", "but not {event}"),
    ("TO", "{__class__}", "but not {__class__}"),
    ("TO", "{event_type.__class__}", "but not {event_type.__class__}"),
    ("TO", "{event_type[0]}", "but not {event_type[0]}"),
    ("TO", "{headers}", "but not {headers}"),
    ("TO", "{headers.a}", "but not {headers.a}"),
    ("TO", "{headers[]}", "{headers[]}"),
    ("TO", "{headers[0]}", "but not {headers[0]}"),
    ("TO", "{headers[a][b]}", "but not {headers[a][b]}"),
    ("TO", "{headers[a].b}", "but not {headers[a].b}"),
    ("TO", "{event_type!r}", "without a conversion"),
    ("TO", "{event_type!s}", "without a conversion"),
    ("TO", "{event_type:d}", "without a conversion"),
    ("TO", "{event_type:>10}", "without a conversion"),
    ("TO", "{event_type:{x}}", "without a conversion"),
    ("TO", "{event_type:{event_type:{event_type}}}", "without a conversion"),
    ("TO", "{headers[a]:{headers[b]}}", "without a conversion"),
    ("SOURCE", "", "as SOURCE"),
    ("SOURCE", "/{shop}", "in SOURCE, but not {shop}"),
    ("FORMAT", "avro", "one of plain, cloudevents, cloudevents-structured as FORMAT"),
    ("FORMAT", None, "as FORMAT"),
    ("FORMAT", [], "as FORMAT"),
    ("BATCH", 0, "from 1 to 500 as BATCH"),
    ("BATCH", 501, "from 1 to 500 as BATCH"),
    ("BATCH", True, "from 1 to 500 as BATCH"),
    ("BATCH", 2.0, "from 1 to 500 as BATCH"),
    ("BATCH", "5", "from 1 to 500 as BATCH"),
    ("WITHIN", -0.1, "0 to 1 seconds as WITHIN"),
    ("WITHIN", 1.1, "0 to 1 seconds as WITHIN"),
    ("WITHIN", True, "0 to 1 seconds as WITHIN"),
    ("WITHIN", float("nan"), "0 to 1 seconds as WITHIN"),
    ("WITHIN", None, "0 to 1 seconds as WITHIN"),
    ("OPTIONS", None, "a dict as OPTIONS, but not NoneType"),
    ("OPTIONS", [("url", SECRET)], "a dict as OPTIONS, but not list"),
    ("OPTIONS", {5: SECRET}, "names as keys of OPTIONS"),
]


@cases(("key", "value", "expected"), WRONG, ids=str)
def test_of_one_relay(key: str, value: Any, expected: str) -> None:
    found = fault(**{key: value})
    assert found is not None
    assert expected in found
    assert "hunter2" not in found


@cases("value", [SECRET + "{", SECRET + "{x}", SECRET + "{}"], ids=str)
def test_a_url_with_a_password_is_not_shown(value: str) -> None:
    found = fault(TO=value)
    assert found is not None
    assert "hunter2" not in found


@cases(
    ("key", "value"),
    [
        ("EVENTS", ("order.*", "stock.moved")),
        ("EVENTS", ["x" * 128]),
        ("TO", "orders"),
        ("TO", "{{event_type}}"),
        ("TO", SECRET),
        *(("TO", f"a-{{{each}}}-b") for each in FIELDS[:-1]),
        ("TO", "{headers[x-topic]}.{headers[a.b c]}.{event_type}"),
        ("SOURCE", "/shops/{tenant_id}"),
        ("FORMAT", "cloudevents-structured"),
        ("BATCH", 500),
        ("WITHIN", 1),
        ("OPTIONS", {"bootstrap.servers": "x"}),
        ("RETRY", object()),  # a check reads it
    ],
    ids=[
        "tuple",
        "long",
        "constant",
        "braces",
        "url",
        *FIELDS[:-1],
        "headers",
        "source",
        "format",
        "batch",
        "within",
        "options",
        "retry",
    ],
)
def test_of_one_relay_that_fits(key: str, value: Any) -> None:
    assert fault(**{key: value}) is None


# -- system checks ---------------------------------------------------------------------------------


def test_a_sound_relay_hears_nothing() -> None:
    assert checked_relay() == []
    assert checked_relay(OPTIONS={"color": "blue", "timeout": 15}) == []


def test_e001_a_setting_that_does_not_fit_and_no_password() -> None:
    [error] = checked_relay(TO=SECRET + "{x}")
    assert error.id == "django_outbox.E001"
    assert "OUTBOX[\"RELAYS\"] is not valid; expected for the relay 'orders'" in error.msg
    assert "hunter2" not in f"{error.msg} {error.hint}"


def test_e002_a_retry_policy_that_cannot_be_read_does_not_keep_the_project_from_starting() -> None:
    for value in ("nonsense.x", "nonsense", {"policy": "nonsense"}, {"base": -1}, 5):
        [error] = checked_relay(RETRY=value)
        assert (error.id, error.is_serious()) == ("django_outbox.E002", True)
        assert 'OUTBOX["RELAYS"][\'orders\']["RETRY"]' in error.msg


@cases(
    ("path", "message", "hint"),
    [
        ("nonsense.Kafka", "cannot be imported", "install what the module imports"),
        ("tests.relay_backend.Kafka", "cannot be imported", "Correct the dotted path"),
        ("django_outbox.relays.kafak.Kafka", "cannot be imported", "relays.kafka.Kafka"),
        ("tests.relay_backend.BROKER", "expected a subclass of", "Correct"),
        ("tests.relay_backend.Broker", "expected a subclass of", "Correct"),
        ("django_outbox.relays.Message", "expected a subclass of", "Correct"),
    ],
)
def test_e019_a_backend_that_cannot_be_used(path: str, message: str, hint: str) -> None:
    [error] = checked_relay(BACKEND=path)
    assert (error.id, error.is_serious()) == ("django_outbox.E019", True)
    assert 'OUTBOX["RELAYS"][\'orders\']["BACKEND"]' in error.msg
    assert message in error.msg
    assert hint in (error.hint or "")


def test_e019_names_the_extra_of_a_client_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "needs_client.py").write_text("import a_client_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(EXTRAS, "needs_client.Kafka", "kafka")
    [error] = checked_relay(BACKEND="needs_client.Kafka")
    assert error.id == "django_outbox.E019"
    assert "a_client_that_is_missing" in error.msg
    assert error.hint == 'Run pip install "django-transactional-outbox[kafka]".'


def test_the_extras_are_those_of_the_package() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    extras = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    for path, extra in EXTRAS.items():
        assert f"\n{extra} = [" in extras, path


@cases("path", EXTRAS)
def test_each_backend_of_the_package_is_there(path: str) -> None:
    try:
        found = import_string(path)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("django_outbox"):
            raise
        pytest.skip(f"{error.name} is not installed")
    assert issubclass(found, Backend)


class Stubborn(Backend):
    def __init__(self, **options: Any) -> None:
        raise KeyError("hunter2")


@cases(
    ("relay", "message"),
    [
        ({"OPTIONS": {"color": "none"}}, "color is 'none'; expected a color."),
        ({"OPTIONS": {"colour": "blue"}}, "unexpected keyword argument 'colour'"),
        ({"OPTIONS": {"timeout": 0}}, "expected seconds above zero"),
        ({"OPTIONS": {"timeout": True}}, "expected seconds above zero"),
        ({"OPTIONS": {"timeout": "10"}}, "expected seconds above zero"),
        ({"BACKEND": "tests.test_relay_settings.Stubborn"}, "Stubborn raises KeyError."),
    ],
    ids=str,
)
def test_e029_options_that_the_backend_refuses(relay: dict[str, Any], message: str) -> None:
    [error] = checked_relay(**relay)
    assert (error.id, error.is_serious()) == ("django_outbox.E029", True)
    assert 'OUTBOX["RELAYS"][\'orders\']["OPTIONS"]' in error.msg
    assert message in error.msg
    assert "hunter2" not in error.msg


def test_w031_a_timeout_that_is_longer_than_half_a_lease() -> None:
    [warning] = checked_relay(OPTIONS={"timeout": 16})
    assert (warning.id, warning.is_serious()) == ("django_outbox.W031", False)
    assert "a timeout of 16 s, but a call ends after 15 s" in warning.msg
    assert checked_relay({"LEASE": 32}, OPTIONS={"timeout": 16}) == []


def test_w006_relays_have_no_effect_in_writer_only_mode() -> None:
    [warning] = checked_relay({"MODE": "writer_only"}, BACKEND="nonsense.x")
    assert warning.id == "django_outbox.W006"
    assert "RELAYS" in warning.msg
    assert "relays.relay.Relay" not in warning.msg


def test_no_queue_of_a_relay_is_unknown_or_unused() -> None:
    queues = {"relay.orders": {"WORKERS": 5, "BREAKER": None}}
    with override_settings(OUTBOX={"RELAYS": {"orders": GOOD}, "QUEUES": queues}):
        own = conf.current().queues["relay.orders"]
        assert (own.WORKERS, own.BREAKER) == (5, None)
    assert checked_relay({"QUEUES": queues}) == []
    [warning] = checked_relay({"QUEUES": {"relay.nobody": {}}})
    assert warning.id == "django_outbox.W016"


def test_too_many_queues_and_relays_together() -> None:
    relays = {f"r{n}": GOOD for n in range(8)}
    queues: dict[str, Any] = {f"q{n}": {} for n in range(8)}
    with (
        override_settings(OUTBOX={"RELAYS": relays, "QUEUES": queues}),
        pytest.raises(ImproperlyConfigured, match="17 queues; expected at most 16"),
    ):
        conf.current()
    assert not any(each.title.startswith("relay.") for each in registry.listeners())
