"""No error, check or log of a relay contains a part of a password, token or key."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from botocore.exceptions import ClientError
from django.core.checks import run_checks
from django.db import transaction

import django_outbox as outbox
from django_outbox.exceptions import RetryAfter, Unrecoverable
from django_outbox.listeners.outcomes import Dead
from django_outbox.models import OutboxEvent, OutboxPause
from django_outbox.queue_settings import RelaySettings
from django_outbox.redaction import Redaction, without_secrets
from django_outbox.relays import Backend, BrokerUnavailable, Unconfirmed
from django_outbox.relays.relay import Relay
from tests.brokers import free_port

PORT = free_port()  # nothing listens there
# Each has a part that a client's parser of URLs would take for something else.
PASSWORDS = (
    "Swordf1sh p@ssw0rd-Qx Sw0rd#fishQx Sword:f1sh Sword/f1sh Sword?f1sh=x Sword%f1sh".split()
)
PASSWORDS += ["Sword f1sh", "Schwört-f1sh", "[Sword]f1sh", "'Sword\\f1sh\"", "Zq", "Zq#Xz"]
BACKENDS: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "redis": ("redis.Stream", lambda s: {"url": f"redis://:{s}@127.0.0.1:{PORT}/0"}),
    "redis user": ("redis.Stream", lambda s: {"url": f"redis://shop:{s}@127.0.0.1:{PORT}/0"}),
    "redis tls": (
        "redis.Stream",
        lambda s: {"url": f"rediss://:{s}@127.0.0.1:{PORT}", "ssl_cert_reqs": "sometimes"},
    ),
    "redis option": (
        "redis.Stream",
        lambda s: {"url": f"redis://127.0.0.1:{PORT}/0", "password": s},
    ),
    "redis query": (
        "redis.Stream",
        lambda s: {"url": f"redis://127.0.0.1:{PORT}/0?password={s}&db=first"},
    ),
    "rabbitmq": ("rabbitmq.RabbitMQ", lambda s: {"url": f"amqp://shop:{s}@127.0.0.1:{PORT}/"}),
    "rabbitmq option": (
        "rabbitmq.RabbitMQ",
        lambda s: {"host": "127.0.0.1", "port": PORT, "login": "shop", "password": s},
    ),
    "nats": ("nats.JetStream", lambda s: {"servers": f"nats://shop:{s}@127.0.0.1:{PORT}"}),
    "nats token": ("nats.JetStream", lambda s: {"servers": f"nats://{s}@127.0.0.1:{PORT}"}),
    "nats list": (
        "nats.JetStream",
        lambda s: {"servers": ["nats://127.0.0.1:1", f"shop:{s}@127.0.0.1:2"]},
    ),
    "nats scheme": ("nats.JetStream", lambda s: {"servers": f"http://shop:{s}@127.0.0.1:{PORT}"}),
    "kafka": (
        "kafka.Kafka",
        lambda s: {
            "bootstrap.servers": f"127.0.0.1:{PORT}",
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "shop",
            "sasl.password": s,
            "timeout": 0.5,
            "debug": "all",
        },
    ),
    "kafka key": (
        "kafka.Kafka",
        lambda s: {"bootstrap.servers": f"127.0.0.1:{PORT}", "ssl.key.pem": s, "timeout": 0.5},
    ),
    "sqs": (
        "aws.SQS",
        lambda s: {
            "endpoint_url": f"http://127.0.0.1:{PORT}",
            "region_name": "eu-north-1",
            "aws_access_key_id": s,
            "aws_secret_access_key": s,
            "aws_session_token": s,
            "timeout": 2,
        },
    ),
    "sns": (
        "aws.SNS",
        lambda s: {
            "endpoint_url": f"http://shop:{s}@127.0.0.1:{PORT}",
            "region_name": "eu-north-1",
            "aws_access_key_id": "AKIAX",
            "aws_secret_access_key": s,
            "timeout": 2,
        },
    ),
    "webhook": ("http.Webhook", lambda s: {"secret": {"127.0.0.1": ["whsec_" + s]}}),
}
APART = ("redis option", "rabbitmq option", "kafka", "kafka key", "sqs", "webhook")  # in no URL
IN_URL = [(each, is_quoted) for each in PASSWORDS for is_quoted in (False, True)]
ALONE = [(each, False) for each in PASSWORDS[:4]]
TO = {"sns": "arn:aws:sns:eu-north-1:123456789012:orders", "sqs": "orders"}


def parts(secret: str) -> list[str]:
    """Return what must not be read of a secret: its pieces of five characters, or all of it."""
    plain = [secret, quote(secret, safe="")]
    return [each[at : at + 5] for each in plain for at in range(max(len(each) - 4, 1))]


def expect_hidden(secret: str, *texts: str) -> None:
    for text in texts:
        for part in parts(secret):
            assert part not in text, f"{part!r} in {text!r}"


def everything_of(name: str, options: dict[str, Any]) -> list[str]:
    """Make, open, use and check a relay that does not work; return what it says of it."""
    backend, _ = BACKENDS[name]
    settings = RelaySettings(
        name="orders",
        BACKEND=f"django_outbox.relays.{backend}",
        EVENTS=("order.*",),
        TO=TO.get(name, "orders" if name != "webhook" else f"http://127.0.0.1:{PORT}/"),
        OPTIONS=options,
    )
    relay, said = Relay(settings), [repr(settings)]
    event = outbox.Event(event_type="order.placed", payload=1)
    for work in (relay.new_backend, relay.check, lambda: relay([event])):
        try:
            said.append("" if isinstance(found := work(), Backend) else repr(found))
        except Exception as error:  # noqa: BLE001 - whatever a client raises
            said += ["".join(traceback.format_exception(error)), repr(error)]
    relay.close()
    return said


@pytest.mark.parametrize(
    ("name", "secret", "is_quoted"),
    [(name, *case) for name in BACKENDS for case in (IN_URL if name not in APART else ALONE)],
    ids=str,
)
def test_a_relay_that_does_not_work_says_no_part_of_a_secret(
    name: str, secret: str, is_quoted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)  # of the clients, too
    caplog.set_level(logging.INFO, "botocore")  # which writes whole requests
    backend, options = BACKENDS[name]
    pytest.importorskip(f"django_outbox.relays.{backend.partition('.')[0]}")
    said = everything_of(name, options(quote(secret, safe="") if is_quoted else secret))
    assert len(said) >= 3
    expect_hidden(secret, *said, caplog.text)


# --- what a backend of your own raises and returns ------------------------------------------------

TOKEN = "Swordf1sh/Qx+9"
ERRORS: list[Any] = [
    ValueError(f"bad {TOKEN}"),
    KeyError(TOKEN),
    OSError(2, f"no {TOKEN}", "file"),
    UnicodeEncodeError("ascii", TOKEN + "ä", 14, 15, "no"),
    ClientError({"Error": {"Code": "Denied", "Message": TOKEN}}, "Send"),
    BrokerUnavailable(f"at {quote(TOKEN, safe='')}"),
    Unconfirmed(TOKEN[:-2]),
    Unrecoverable(f"cut {TOKEN[:9]}"),
    RetryAfter(7, f"wait {TOKEN}"),
    Dead(f"gone {TOKEN}"),
]


class Raising(Backend):
    """Returns or raises whatever the test says, with a cause."""

    answer: Any = None
    is_raised = False

    def __init__(self, *, api_token: str) -> None:
        super().__init__()

    def publish(self, messages: Any, deadline: float) -> Any:
        if isinstance(self.answer, BaseException):
            try:
                raise LookupError(f"cause {TOKEN}")
            except LookupError as cause:
                self.answer.__cause__ = cause
            if self.is_raised:
                raise self.answer
        return [self.answer for _ in messages]


@pytest.fixture
def raising(settings: Any) -> type[Raising]:
    settings.OUTBOX = {
        "RELAYS": {
            "orders": {
                "BACKEND": f"{__name__}.Raising",
                "EVENTS": ["order.*"],
                "TO": f"https://shop:{TOKEN}@a.example/{{event_type}}?key={TOKEN}",
                "OPTIONS": {"api_token": TOKEN},
                "RETRY": {"policy": "fixed", "delay": 3600},
            }
        }
    }
    Raising.answer, Raising.is_raised = None, False
    return Raising


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("is_raised", [False, True], ids=["returned", "raised"])
@pytest.mark.parametrize("answer", ERRORS, ids=lambda each: type(each).__name__)
def test_rows_history_breaker_and_log_have_no_part_of_a_secret(
    raising: type[Raising], answer: Any, is_raised: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "django_outbox")
    raising.answer, raising.is_raised = answer, is_raised
    with transaction.atomic():
        outbox.write("order.placed", {})
    outbox.drain()
    row = OutboxEvent.objects.get()
    pauses = [each.reason for each in OutboxPause.objects.all()]
    expect_hidden(
        TOKEN, row.last_error or "", row.cause or "", row.history or "", *pauses, caplog.text
    )
    if isinstance(answer, RetryAfter):
        assert (row.status, row.attempts) == (OutboxEvent.Status.RETRY, 1)
    if isinstance(answer, (Unrecoverable, Dead)):
        assert row.status == OutboxEvent.Status.DEAD
    if isinstance(answer, BrokerUnavailable):
        assert (row.status, row.attempts) == (OutboxEvent.Status.NEW, 0)


def test_the_checks_say_no_part_of_a_secret_and_why(settings: Any) -> None:
    settings.OUTBOX = {
        "RELAYS": {
            "tls": {
                "BACKEND": "django_outbox.relays.redis.Stream",
                "EVENTS": ["a.*"],
                "OPTIONS": {"url": "rediss://:Swordf1sh@a.example", "ssl_cert_reqs": "sometimes"},
            },
            "raw": {
                "BACKEND": "django_outbox.relays.redis.Stream",
                "EVENTS": ["a.*"],
                "OPTIONS": {"url": "redis://:Sw#ordf1sh@a.example"},
            },
        }
    }
    found = {
        each.msg.split("'")[1]: each.msg for each in run_checks() if each.id == "django_outbox.E029"
    }
    assert "sometimes" in found["tls"]
    assert "port" in found["raw"].lower()
    for each in found.values():
        expect_hidden("Swordf1sh", each)
    assert "'Sw'" not in found["raw"]


# --- what is hidden, and what is not --------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "to", "text", "shown"),
    [
        ({"password": "Swordf1sh"}, "", "login of shop: Swordf1sh", "login of shop: ***"),
        ({"password": "Swordf1sh"}, "", "login: swordF1SH", "login: ***"),
        ({"password": "Swordf1sh"}, "", "login: Swordf", "login: ***"),
        ({"password": ""}, "", "login of shop", "login of shop"),
        ({"password": "at"}, "", "at attic 'at'", "*** attic '***'"),
        ({"password": b"Swordf1sh"}, "", "Swordf1sh", "***"),
        ({"secret": {"a.example": ["whsec_abcdefgh"]}}, "", "a.example abcdefgh", "a.example ***"),
        ({"ssl_password": "Swordf1sh"}, "", "Swordf1sh", "***"),
        ({"nkeys_seed_str": "SUABCDEF"}, "", "SUABCDEF", "***"),
        ({"ws_connection_headers": {"Authorization": ["Bearer abcdef"]}}, "", "abcdef", "***"),
        ({"user_credentials": "/etc/nats.creds"}, "", "/etc/nats.creds", "/etc/nats.creds"),
        ({"sasl.oauthbearer.token.endpoint.url": "https://a/"}, "", "https://a/", "https://a/"),
        ({"sasl.username": "shop@a.example"}, "", "shop@a.example", "shop@a.example"),
        (
            {"url": "redis://shop:Swordf1sh@a.example:1"},
            "",
            "shop at a.example:1: Swordf1sh",
            "shop at a.example:1: ***",
        ),
        ({"url": "nats://t0ken-x@a.example"}, "", "t0ken-x at a.example", "*** at a.example"),
        ({"servers": ["a.example", "u:Swordf1sh@b"]}, "", "b Swordf1sh", "b ***"),
        ({"url": "redis://h/0?password=Swordf1sh&db=first"}, "", "first Swordf1sh", "first ***"),
        (
            {},
            "https://a.example/{key}?token=t0ken-x&x={key}",
            "a.example t0ken-x key",
            "a.example *** key",
        ),
        ({}, "https://a.example/@shop/{key}", "a.example shop", "a.example shop"),
        ({}, "orders", "orders", "orders"),
    ],
)
def test_what_is_hidden(options: dict[str, Any], to: str, text: str, shown: str) -> None:
    assert Redaction(options, to).text(text) == shown


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("{event_type}", "{event_type}"),
        ("what?", "what?"),
        ("https://example.org/{event_type}", "https://example.org/{event_type}"),
        ("https://u:hunter2@a.example/hook?token=hunter2", "https://***@a.example/hook?***"),
        ("amqp://user:p@ss@host/x", "amqp://***@host/x"),
        ("https://u:p/ss@a.example/", "https://***@a.example/"),
        ("https://u:p#ss@a.example/", "https://***@a.example/"),
        ("https://t0ken@a.example/", "https://***@a.example/"),
        ("https://a.example/@shop", "https://a.example/@shop"),
        ("https://a.example:443/@shop", "https://a.example:443/@shop"),
        ("https://[::1]:443/@shop", "https://[::1]:443/@shop"),
    ],
)
def test_what_is_shown_of_a_url(given: str, shown: str) -> None:
    assert without_secrets(given) == shown


def test_an_error_without_a_secret_stays_the_same() -> None:
    redaction, error = Redaction({"password": "Swordf1sh"}), ValueError("the queue is full")
    assert redaction.error(error) is error
    hidden = redaction.error(OSError(2, "Swordf1sh"))
    assert isinstance(hidden, FileNotFoundError)
    assert str(hidden) == "[Errno 2] ***"
