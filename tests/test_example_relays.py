"""The example shop relays by settings, and the recipe for Celery does what its page says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_outbox.setting_rules import relays as relays_fault
from example_project.broker import relays_from
from tests import brokers
from tests.cases import cases

ROOT = Path(__file__).resolve().parent.parent


ORDER = """
import django
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
call_command("seed")
from example_project.shop.models import Product
from example_project.shop.ordering import place
place("Ada", {Product.objects.get(sku="teapot"): 1})
call_command("outbox_worker", "--once")
from django_outbox.models import OutboxEvent
print(*(f"{event.event_type} {event.listener}" for event in OutboxEvent.objects.all()), sep="\\n")
"""


@cases(
    "url",
    ["amqp://a:b@h/", "amqps://h/", "nats://h", "redis://h/1", "kafka://h:9092", "https://h/{x}"],
)
def test_each_scheme_is_a_valid_relay(url: str) -> None:
    found = relays_from(url)
    assert relays_fault(found) is None
    assert found["broker"]["EVENTS"] == ["*"]


def test_a_webhook_gets_its_secret_and_its_url() -> None:
    relay = relays_from("https://h/{x}", secret="whsec_x")["broker"]
    assert (relay["OPTIONS"]["secret"], relay["TO"].format()) == ("whsec_x", "https://h/{x}")


def test_an_unknown_scheme_is_named_with_the_known_ones() -> None:
    with pytest.raises(ImproperlyConfigured, match="begins with 'ftp'; expected one of amqp, "):
        relays_from("ftp://localhost")


def test_the_example_relays_if_it_is_told_to(tmp_path: Path) -> None:
    """Off by default; with ``RELAY_URL`` every event goes to the relay and its other listeners."""
    assert relays_from("") == {}
    broker = brokers.Redis(tmp_path)
    broker.start()
    try:
        sent = relayed(broker.url, tmp_path)
    finally:
        broker.stop()
    assert {entry[b"event-type"] for entry in sent} >= {b"order.placed", b"parcel.requested"}


def relayed(url: str, tmp_path: Path) -> list[dict[bytes, bytes]]:
    """Place an order in a process whose ``RELAY_URL`` this is; return what the broker has."""
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        "DATABASE_URL": f"sqlite:///{tmp_path / 'example.sqlite3'}",
        "RELAY_URL": url,
    }
    done = subprocess.run(
        [sys.executable, "-c", ORDER],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("relay.broker") == 3, done.stdout
    import redis

    with redis.Redis.from_url(url) as client:
        return [entry for _, entry in client.xrange("events")]
