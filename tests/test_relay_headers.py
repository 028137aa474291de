"""Headers of an event that are commands to a broker, or to the clients behind it, are not sent."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import Any

import pytest
from django.utils.module_loading import import_string

import django_outbox as outbox
from django_outbox.queue_settings import RelaySettings
from django_outbox.relays.envelope import message_of
from tests.relay_backend import InMemory

KEPT = ["trace", "x-shop", "X-Request-Id", "natsy", "x-nats-rollup", "cc2", "abcc", "x-delays"]
COMMANDS = {
    "nats.JetStream": """
        Nats-Rollup nats-rollup NATS-MSG-ID Nats-Msg-Id Nats-Expected-Stream
        Nats-Expected-Last-Sequence Nats-Expected-Last-Subject-Sequence Nats-TTL Nats-Schedule
        Nats-Schedule-Target Nats-Marker-Reason Nats-Incr Nats-Batch-Commit
        Nats-Required-Api-Level Nats-Service-Error KV-Operation Status
    """,
    "rabbitmq.RabbitMQ": """
        CC BCC cc Bcc x-delay X-Delay x-death x-match x-first-death-queue x-last-death-reason
        x-received-from x-shovelled x-shovelled-timestamp x-stream-filter-value x-stream-offset
        x-opt-deliver-by x-delivery-count x-acquired-count x-deduplication-header x-cache-ttl
        x-recent-history-no-store
    """,
    "kafka.Kafka": "",  # it interprets none
    "redis.Stream": "",  # nor does it
    "aws.SQS": "AWS.x Amazon.x ExtendedPayloadSize SQSLargePayloadSize",
    "aws.SNS": "AWS.SNS.SMS.MaxPrice aws.sns.sms.senderid AWS.SNS.MOBILE.APNS.TTL",
    "http.Webhook": """
        Host Content-Length content-encoding Content-Type Transfer-Encoding Connection
        Keep-Alive TE Trailer Upgrade HTTP2-Settings Expect Authorization Proxy-Authorization
        Proxy-Connection Cookie User-Agent Accept-Encoding Range If-None-Match Forwarded
        X-Forwarded-For X-Forwarded-Host X-HTTP-Method-Override X-Method-Override Via Webhook-Id
        webhook-signature WEBHOOK-TIMESTAMP webhook-url Max-Forwards
    """,
}


def sent(backend: Any, names: list[str], **settings: Any) -> dict[str, str]:
    relay = RelaySettings(name="orders", BACKEND="x.Y", EVENTS=("order.*",), **settings)
    event = outbox.Event(
        event_type="order.placed",
        payload=1,
        headers={name: f"of {name}" for name in names},
        occurred_at=datetime(2026, 3, 1, tzinfo=timezone.utc),
    )
    return dict(message_of(event, relay, backend).headers)


@pytest.mark.parametrize("format_", ["plain", "cloudevents", "cloudevents-structured"])
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_are_left_out_and_all_else_is_sent(name: str, format_: str) -> None:
    pytest.importorskip(f"django_outbox.relays.{name.partition('.')[0]}")
    backend = import_string(f"django_outbox.relays.{name}")
    found = sent(backend, [*COMMANDS[name].split(), *KEPT], FORMAT=format_)
    assert [each for each in found if found[each].startswith("of ") and each in KEPT] == KEPT
    assert {*found} & {*COMMANDS[name].split()} == set()


def test_what_commands_one_broker_is_sent_to_another() -> None:
    pytest.importorskip("django_outbox.relays.redis")
    backend = import_string("django_outbox.relays.redis.Stream")
    everything = " ".join(COMMANDS.values()).split()
    assert {*sent(backend, everything)} >= {*everything}


def test_a_backend_of_your_own_says_which() -> None:
    class Careful(InMemory):
        commands = re.compile("purge|stop-.*")

    found = sent(Careful, ["purge", "purged", "stop-all", "Purge"])
    assert {*found} & {"purge", "purged", "stop-all", "Purge"} == {"purged", "Purge"}
