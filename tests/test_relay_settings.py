"""``OUTBOX["RELAYS"]``: what its values may be, and what the system checks say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.core.checks import CheckMessage, run_checks
from django.test import override_settings

from django_outbox import conf
from django_outbox.checks.queues import EXTRAS
from django_outbox.queue_settings import FIELDS
from django_outbox.relays import Backend
from django_outbox.setting_rules import relays as relays_fault
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


WHOLE: list[tuple[Any, str]] = [
    ([], "a dict with the settings of each relay"),
    ("orders", "a dict with the settings of each relay"),
    ({1: GOOD}, "letters, digits, '_' or '-', but not 1"),
    *(({name: GOOD}, f"but not {name!r}") for name in ("", "a.b", "-a")),
    ({"a" * 51: GOOD}, "names of 1 to 50"),
    ({"a": None}, "for the relay 'a', but not NoneType"),
    ({"a": SECRET}, "for the relay 'a', but not str"),
    ({"a": {"EVENTS": ["x"]}}, "BACKEND for the relay 'a'"),
    ({"a": {"BACKEND": IN_MEMORY}}, "EVENTS for the relay 'a'"),
    *(({"a": {**GOOD, name: "x"}}, f"but not {name!r}") for name in ("TOPIC", "name", 5)),
    ({"a": {**GOOD, "FORMATS": "x"}}, "did you mean FORMAT?"),
]


@cases(("value", "expected"), WHOLE, ids=str)
def test_of_the_whole_setting(value: Any, expected: str) -> None:
    assert expected in (relays_fault(value) or "")


@cases("value", [None, {}, {"a": GOOD}, {"a-b_C1": GOOD}, {"a" * 50: GOOD}], ids=str)
def test_of_the_whole_setting_that_fits(value: Any) -> None:
    assert relays_fault(value) is None


ODD = "{} {0} {payload} {event} {__class__} {event_type.__class__} {event_type[0]} {headers}"
ODD += " {headers.a} {headers[0]} {headers[a][b]} {headers[a].b}"
CONVERTED = "{event_type!r} {event_type!s} {event_type:d} {event_type:>10} {event_type:{x}}"
CONVERTED += " {event_type:{event_type:{event_type}}} {headers[a]:{headers[b]}}"
WRONG: list[tuple[str, str, list[Any]]] = [  # key, what is said, and values
    ("BACKEND", "the path of a class", [None, "Kafka", ".", "..Kafka", "a b.Kafka", Backend]),
    ("EVENTS", "a list of event types", ["order.*", b"order.*", None, {"order.*"}, 5]),
    ("EVENTS", "it is empty", [[], ()]),
    ("EVENTS", "but not ", [["order.*", 5], ("order.*", None), [["order.*"]], [b"x"], [""]]),
    ("EVENTS", "1 to 128 characters", [["x" * 129]]),
    ("TO", "an empty text", [""]),
    ("TO", "a text such as", [None, 5, ["{event_type}"]]),
    ("TO", "it is not one", ["{", "}", "{event_type", "{headers[a}", SECRET + "{"]),
    *(("TO", f"but not {each}", [each, SECRET + each]) for each in ODD.split()),
    ("TO", "but not { event_type}", ["{ event_type}"]),
    ("TO", "{headers[]}", ["{headers[]}"]),
    ("TO", "without a conversion", CONVERTED.split()),
    ("SOURCE", "SOURCE as", [""]),
    ("SOURCE", "{headers[name]}, but not {shop}", ["/{shop}"]),
    ("FORMAT", "one of plain, cloudevents, cloudevents-structured", ["avro", None, []]),
    ("BATCH", "BATCH as a whole number of at least 1, at most 500", [0, 501, True, 2.0, "5"]),
    ("WITHIN", "WITHIN as a number of at least 0", [-0.1, 1.1, True, float("nan"), None]),
    ("OPTIONS", "OPTIONS as a dict, but not NoneType", [None]),
    ("OPTIONS", "OPTIONS as a dict, but not list", [[("url", SECRET)]]),
    ("OPTIONS", "keys are names, but not 5", [{5: SECRET}]),
]


@cases(("key", "expected", "values"), WRONG, ids=str)
def test_of_one_relay(key: str, expected: str, values: list[Any]) -> None:
    for value in values:
        found = fault(**{key: value}) or ""
        assert expected in found, value
        assert "hunter2" not in found


FITTING: dict[str, list[Any]] = {
    "EVENTS": [("order.*", "stock.moved"), ["x" * 128]],
    "TO": [
        *("orders", "{{event_type}}", SECRET, "{headers[x-topic]}.{headers[a.b c]}.{event_type}"),
        *(f"a-{{{each}}}-b" for each in FIELDS),
    ],
    "SOURCE": ["/shops/{tenant_id}"],
    "FORMAT": ["cloudevents-structured"],
    "BATCH": [500],
    "WITHIN": [1],
    "OPTIONS": [{"bootstrap.servers": "x"}],
    "RETRY": [object()],  # a check reads it
}


@cases(("key", "values"), FITTING.items(), ids=str)
def test_of_one_relay_that_fits(key: str, values: list[Any]) -> None:
    assert [fault(**{key: value}) for value in values] == [None] * len(values)


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


# -- options of the package's backends -------------------------------------------------------------

KAFKA, REDIS = {"bootstrap.servers": "127.0.0.1:1"}, {"url": "redis://localhost"}
AWS: list[tuple[dict[str, Any], str]] = [
    ({"color": "red"}, "unexpected keyword argument 'color'"),
    ({"timeout": 0}, "timeout is 0; expected seconds above zero"),
    ({"region_name": ""}, "region_name is of type str; expected a str that is not empty"),
    ({"aws_secret_access_key": "open-sesame"}, "go together; give both"),
]
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "aws.SQS": AWS,
    "aws.SNS": AWS,
    "http.Webhook": [
        ({"color": 1}, "unexpected keyword argument 'color'"),
        ({"timeout": -1}, "timeout is -1; expected seconds above zero"),
        ({"allow_http": 1}, "allow_http is 1; expected True or False"),
        ({"allow_private": "no"}, "allow_private is 'no'; expected True or False"),
        ({"concurrency": 0}, "concurrency is 0; expected a whole number"),
        ({"concurrency_per_host": True}, "concurrency_per_host is True; expected"),
        ({"verify": False}, "verify is False; expected True or the path"),
        ({"secret": "hunter2!"}, "24 to 64 bytes in base64"),
        ({"secret": "whsec_aHVudGVyMg=="}, "24 to 64 bytes in base64"),
        ({"secret": {"a.example": "hunter2!"}}, "24 to 64 bytes in base64"),
        ({"secret": []}, "secret is of type list"),
        ({"secret": 5}, "secret is of type int"),
    ],
    "kafka.Kafka": [
        ({}, "bootstrap.servers is missing; expected host:port"),
        ({"bootstrap.server": "a:1"}, "bootstrap.servers is missing"),
        ({**KAFKA, "acks_": "all"}, 'No such configuration property: "acks_"'),
        ({**KAFKA, "acks": "1"}, "`acks` must be set to `all` when `enable.idempotence` is true"),
        ({**KAFKA, "linger.ms": "soon"}, "Invalid value for configuration property"),
        ({**KAFKA, "message.timeout.ms": 60000}, "expected at most timeout, 10000 ms"),
        ({**KAFKA, "delivery.timeout.ms": 60000}, "expected at most timeout, 10000 ms"),
        ({**KAFKA, "transactional.id": "t"}, "transactional.id cannot be set"),
        ({**KAFKA, "error_cb": print}, "error_cb cannot be set"),
        ({**KAFKA, "timeout": 0}, "timeout is 0; expected seconds above zero"),
    ],
    "nats.JetStream": [
        ({"server": "x"}, "unknown option 'server'; expected one of connect_timeout, "),
        ({"allow_reconnect": True}, "unknown option 'allow_reconnect'"),
        ({"servers": 4222}, "servers is not a URL such as"),
        ({"servers": ["http://shop:hunter2@a"]}, "servers has an invalid URL; expected"),
        ({"servers": "nats://a:port"}, "servers has an invalid URL"),
        ({"stream": "a b"}, "stream is 'a b'; expected the name of a JetStream stream"),
        ({"domain": "a.b"}, "domain is 'a.b'; expected the name of a JetStream domain"),
        ({"timeout": "soon"}, "timeout is 'soon'"),
    ],
    "rabbitmq.RabbitMQ": [
        ({"urls": "x"}, "unknown option 'urls'; expected one of client_properties, "),
        ({"url": "amqp://a/", "host": "b"}, "both say where to connect to"),
        ({"url": "http://guest:hunter2@a/"}, "not an AMQP URL; expected"),
        ({"exchange": "a b"}, "exchange is 'a b'; expected up to 127 letters"),
        ({"exchange": None}, "exchange is None"),
        ({"declare": "no"}, "declare is 'no'; expected True or False"),
        ({"timeout": 0}, "timeout is 0; expected seconds above zero"),
    ],
    "redis.Stream": [
        ({}, "url"),
        ({**REDIS, "max_len": 5}, "max_len"),
        ({**REDIS, "maxlen": 0}, "maxlen is 0; expected a number of entries"),
        ({**REDIS, "timeout": -1}, "timeout is -1; expected seconds"),
        ({**REDIS, "retry": None}, "retry cannot be set"),
        ({"url": "localhost:6379"}, "expected redis://user:password@host:port/database"),
        ({"url": "redis://:se/same@localhost"}, "url cannot be read"),
    ],
}


@pytest.mark.parametrize("path", REFUSED)
def test_options_that_no_backend_takes_are_named_without_their_secrets(
    path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    module, _, name = path.partition(".")
    backend = getattr(pytest.importorskip(f"django_outbox.relays.{module}"), name)
    for options, said in REFUSED[path]:
        with pytest.raises((TypeError, ValueError)) as raised:
            backend(**options)
        assert said in str(raised.value)
        for secret in ("hunter2", "aHVudGVyMg", "same"):
            assert secret not in str(raised.value)
    assert capfd.readouterr() == ("", "")
