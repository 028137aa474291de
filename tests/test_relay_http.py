"""The relay to webhooks: receivers on this machine, and the signatures' reference verifier."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from email.utils import formatdate
from time import monotonic
from typing import Any

import pytest

import django_outbox as outbox
from django_outbox.models import OutboxEvent, OutboxPause
from django_outbox.relays import BrokerUnavailable
from django_outbox.relays.relay import CheckFailed, relays
from tests import relay_messages, samples
from tests.brokers import free_port
from tests.receiver import Receiver, certificate, receiving
from tests.relay_messages import drained, opener, use_relay, write
from tests.waiting import wait_until

httpcore = pytest.importorskip("httpcore")
pytest.importorskip("httpx")
standardwebhooks = pytest.importorskip("standardwebhooks")

from django_outbox.relays import http_hosts  # noqa: E402
from django_outbox.relays.backend import Message, Refused  # noqa: E402
from django_outbox.relays.http import Webhook  # noqa: E402
from django_outbox.relays.http_hosts import AddressRefused, Hosts, hosts, is_public  # noqa: E402
from django_outbox.relays.http_messages import headers_of, url_of  # noqa: E402
from tests.cases import cases  # noqa: E402

database = pytest.mark.django_db(transaction=True)

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # not in use anywhere
OTHER_SECRET = "whsec_bm90IGluIHVzZSBhbnl3aGVyZSwgZWl0aGVy"
LOCAL = {"allow_http": True, "allow_private": True}


@pytest.fixture(autouse=True)
def no_host_remembered() -> Iterator[None]:
    hosts.clear()
    yield
    hosts.clear()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


@pytest.fixture
def client() -> Iterator[Any]:
    """Yield a function that opens a webhook to receivers on this machine."""

    def make(to: str = "", **options: Any) -> Webhook:
        backend = Webhook(**{**LOCAL, **options})
        backend.to = to
        return backend

    with opener(make) as opened:
        yield opened


def message(to: str, number: int = 0, **fields: Any) -> Message:
    return relay_messages.numbered(number, **{"to": to, "body": b'{"n":1}', **fields})


def delay(outcome: Any) -> float:
    """Return for how long a message was deferred."""
    assert type(outcome) is outbox.Defer, outcome
    return float(outcome.delay)


def verify(receiver: Receiver, secret: str = SECRET) -> None:
    """Let the reference implementation check each signature."""
    assert receiver.received
    for _, headers, body in receiver.received:
        standardwebhooks.Webhook(secret).verify(body, headers)


# --- through the outbox ---------------------------------------------------------------------------


@pytest.fixture
def relay(settings: Any) -> Any:
    """Return a function that configures a relay."""
    options = {**LOCAL, "secret": SECRET}
    return lambda to, **own: use_relay(
        settings, "http.Webhook", to, own.pop("OPTIONS", options), **own
    )


@database
def test_a_webhook_has_the_stored_text_its_headers_and_a_signature(
    relay: Any, receiver: Receiver
) -> None:
    relay(f"{receiver.origin}/hooks/{{event_type}}/{{tenant_id}}?k={{key}}")
    row = write(tenant_id="a/b ä", key="1&2")
    assert drained(row) == ("DONE", 0)
    ((path, headers, body),) = receiver.received
    assert path == "/hooks/order.placed/a%2Fb%20%C3%A4?k=1%262"
    assert body.decode() == row.payload
    expected = {"webhook-id": row.pk, "host": f"127.0.0.1:{receiver.port}"}
    assert {**expected, "user-agent": "django-outbox"}.items() <= headers.items()
    verify(receiver)
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        verify(receiver, OTHER_SECRET)


RETRY_AFTER = ("1800", "date", "1e99", "Sun, 06 Nov 1994 08:49:37 GMT", "99999999999")


@database
@pytest.mark.parametrize(
    ("status", "retry_after", "expected"),
    [
        *((status, "", ("DONE", 0)) for status in (200, 202)),
        *((status, "", ("RETRY", 1)) for status in (302, 400, 404, 429, 500)),
        *((429, given, ("RETRY", 1)) for given in RETRY_AFTER),
        (502, "1800", ("RETRY", 1)),
        (410, "", ("DEAD", 0)),
        (503, "", ("NEW", 0)),
    ],
)
def test_what_a_receiver_answers(
    relay: Any, receiver: Receiver, status: int, retry_after: str, expected: Any
) -> None:
    """Retry-After counts for 429, up to a day; otherwise the retry policy waits an hour."""
    in_half_an_hour = formatdate(time.time() + 1800, usegmt=True)
    given = in_half_an_hour if retry_after == "date" else retry_after
    headers = {"retry-after": given} if given else {}
    location = {"location": f"{receiver.origin}/elsewhere"}
    receiver.answer = lambda path, body: (status, {**headers, **location}, b"")
    relay(receiver.url)
    row = write()
    assert drained(row) == expected
    assert [path for path, *_ in receiver.received] == ["/hooks"]  # no redirect was followed
    if expected == ("RETRY", 1):
        assert f"answered {status}" in row.last_error
        wait = {"1800": 1800, "date": 1800, "99999999999": 86_400}.get(retry_after, 3600)
        wait = 3600 if status == 502 else wait
        due = (row.available_at - row.created_at).total_seconds()
        assert due == pytest.approx(wait, abs=60)


@database
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "[::1]", "10.0.0.1"])
def test_a_private_address_from_an_event_ends_the_event(
    relay: Any, receiver: Receiver, host: str
) -> None:
    relay("{headers[url]}", OPTIONS={"allow_http": True})
    row = write(headers={"url": receiver.url.replace("127.0.0.1", host)})
    assert drained(row) == ("DEAD", 0)
    assert f"{host.strip('[]')} has no public address" in row.last_error
    assert receiver.connections == 0


@database
@pytest.mark.parametrize("limit", [None, 60])
def test_a_host_from_an_event_that_is_down_is_named_and_ends_by_the_limit(
    relay: Any, settings: Any, limit: int | None
) -> None:
    relay("{headers[url]}")
    settings.OUTBOX = {**settings.OUTBOX, "DEFER_LIMIT": limit}
    port = free_port()
    row = write(headers={"url": f"http://127.0.0.1:{port}/"})
    assert drained(row) == ("NEW", 0)
    assert f"127.0.0.1:{port} cannot be reached" in row.last_error
    assert row.history is None
    due = row.available_at - timedelta(hours=1)
    OutboxEvent.objects.update(first_due_at=due, available_at=due)
    assert drained(row) == (("DEAD", 0) if limit else ("NEW", 0))
    assert f"127.0.0.1:{port} cannot be reached" in row.last_error


@database
@pytest.mark.parametrize("fault", ["expired", "another name", "unknown", "no TLS"])
def test_a_host_from_an_event_without_valid_tls_costs_attempts(
    relay: Any, receiver: Receiver, tmp_path: Any, fault: str
) -> None:
    host = "wrong.example" if fault == "another name" else "127.0.0.1"
    files = certificate(tmp_path, host=host, days=-1 if fault == "expired" else 1)
    options = {**LOCAL, "verify": True if fault == "unknown" else str(files[0])}
    with receiving(certificate=files) as secure:
        url = receiver.url.replace("http:", "https:") if fault == "no TLS" else secure.url
        relay("{headers[url]}", OPTIONS=options)
        row = write(headers={"url": url})
        assert drained(row) == ("RETRY", 1)
        assert "cannot be reached" in row.last_error
        assert "SSL" in row.last_error
        relays()[0].close()


@database
@pytest.mark.parametrize("missing", ["allow_http", "allow_private"])
def test_a_mistake_in_the_settings_ends_no_event(
    relay: Any, receiver: Receiver, missing: str
) -> None:
    relay(receiver.url, OPTIONS={**LOCAL, missing: False})
    row = write()
    assert drained(row) == ("NEW", 0)
    with pytest.raises((CheckFailed, BrokerUnavailable), match=f"set the option {missing}"):
        relays()[0].check()
    assert receiver.connections == 0


@database
def test_an_outage_of_one_host_stops_no_other_and_no_queue(relay: Any) -> None:
    port = free_port()
    relay("http://127.0.0.1:{tenant_id}/hooks")
    with receiving() as healthy, outbox.Worker():
        away = [write(tenant_id=str(port)) for _ in range(20)]
        for _ in range(3):
            healthy.received.clear()
            for _ in range(5):
                write(tenant_id=str(healthy.port))
            wait_until(lambda: len(healthy.received) == 5)
        assert not OutboxPause.objects.exists()
        with receiving(port=port) as receiver:
            wait_until(lambda: len(receiver.received) >= 20)
            assert sorted(receiver.ids()) == sorted(row.pk for row in away)
            wait_until(lambda: not OutboxEvent.objects.exclude(status=OutboxEvent.Status.DONE))
            relays()[0].close()
    assert {*OutboxEvent.objects.values_list("attempts", flat=True)} == {0}


# --- requests -------------------------------------------------------------------------------------


def test_concurrency_is_limited_and_connections_are_kept(client: Any, receiver: Receiver) -> None:
    sender = client(concurrency=5, concurrency_per_host=3)
    many = [message(receiver.url, n) for n in range(200)]
    assert sender.send(*many, within=60) == [None] * 200
    assert sorted(receiver.ids()) == sorted(f"e{n}" for n in range(200))
    assert receiver.most <= 3
    assert receiver.connections <= 6
    with receiving() as second:
        both = [message(each.url, n) for each in (receiver, second) for n in range(50)]
        receiver.hold.clear()
        second.hold.clear()
        found = list[Any]()
        thread = threading.Thread(target=lambda: found.extend(sender.send(*both, within=60)))
        thread.start()
        wait_until(lambda: receiver.in_flight + second.in_flight == 5)
        assert max(receiver.in_flight, second.in_flight) == 3
        receiver.hold.set()
        second.hold.set()
        thread.join(60)
        assert found == [None] * 100


def test_one_host_that_hangs_holds_up_no_other(client: Any, receiver: Receiver) -> None:
    """What is under way to it costs an attempt; the rest is put off, and nothing is sent later."""
    with receiving() as healthy:
        receiver.hold.clear()
        messages = [message(each.url, n) for n in range(20) for each in (receiver, healthy)]
        sender = client("{headers[url]}")
        found = sender.send(*messages, within=2)
        assert found[1::2] == [None] * 20
        assert [type(each) for each in found[0::2]] == [Refused] * 4 + [outbox.Defer] * 16
        assert [delay(each) for each in found[8::2]] == [pytest.approx(3, abs=0.5)] * 16
        assert str(found[0]) == f"127.0.0.1:{receiver.port} did not answer in time."
        receiver.hold.set()
        again = sender.send(message(receiver.url, 77), message(healthy.url, 78))
        assert (delay(again[0]), again[1]) == (pytest.approx(3, abs=0.2), None)
        assert len(receiver.received) == 4


def test_a_host_that_answers_others_is_not_away_for_one_slow_answer(
    client: Any, receiver: Receiver
) -> None:
    def answer(path: str, body: bytes) -> Any:
        if path == "/slow":
            slow.wait(10)
        return 204, {}, b""

    slow = threading.Event()
    receiver.answer = answer
    sender = client(receiver.url)
    others = [message(receiver.url, n) for n in range(1, 6)]
    found = sender.send(message(f"{receiver.origin}/slow"), *others, within=2)
    slow.set()
    assert type(found[0]) is Refused
    assert found[1:] == [None] * 5
    assert sender.send(message(receiver.url)) == [None]


def test_answers_are_read_in_part_and_for_a_short_time(client: Any, receiver: Receiver) -> None:
    """A status of 2xx counts, however long its body is, or if the body does not come."""
    receiver.answer = lambda path, body: (200, {}, b"x" * 5_000_000)
    sender = client()
    assert sender.send(message(receiver.url)) == [None]
    assert sender.backend._connections.connections == []  # closed, instead of reading on
    receiver.answer = lambda path, body: (200, {"content-length": "10"}, b"x")
    assert client().send(message(receiver.url)) == [None]


def test_an_error_shows_200_characters_of_the_answer_and_no_secret(
    client: Any, receiver: Receiver
) -> None:
    receiver.answer = lambda path, body: (400, {}, b"not\r\n\x1b[31m" + "ü".encode() * 5000)
    to = f"{receiver.url}/T0KEN?key=T0KEN"
    (found,) = client(secret=SECRET).send(message(to, body=b'{"password":"hunter2"}'))
    assert str(found).startswith(f"127.0.0.1:{receiver.port} answered 400: not [31mü")
    assert len(str(found)) < 250
    for secret in ("T0KEN", "hunter2", SECRET[6:]):
        assert secret not in str(found)


def test_a_connection_that_is_cut_is_tried_once_more(client: Any, receiver: Receiver) -> None:
    cut = iter([0, 204, 0, 0, 0])
    receiver.answer = lambda path, body: (next(cut), {}, b"")
    sender = client("{headers[url]}")
    assert sender.send(message(receiver.url)) == [None]
    assert len(receiver.received) == 2
    (found,) = sender.send(message(receiver.url))
    assert str(found) == f"127.0.0.1:{receiver.port} closed the connection without an answer."
    assert len(receiver.received) == 4


def test_cookies_and_proxies_of_the_environment_are_not_used(
    client: Any, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    receiver.answer = lambda path, body: (200, {"set-cookie": "a=b; Path=/"}, b"")
    sender = client()
    assert sender.send(message(receiver.url)) == [None]
    assert sender.send(message(receiver.url)) == [None]
    assert "cookie" not in receiver.received[1][1]


# --- headers and signatures -----------------------------------------------------------------------


def test_of_names_that_differ_in_case_the_last_is_sent_without_its_margins() -> None:
    given = {"X-Own": " kept ", "CE-ID": "a b", "ce-id": "c d"}
    found = headers_of(message("", headers=given))
    assert (found["x-own"], found["ce-id"]) == (b"kept", b"c%20d")


def test_cloudevents_attributes_never_break_a_header() -> None:
    found = headers_of(message("", headers={"ce-x": 'a\r\nb: "c" 100% \x7f'}))
    assert found["ce-x"] == b"a%0D%0Ab:%20%22c%22%20100%25%20%7F"


def test_no_secret_one_or_several(client: Any, receiver: Receiver) -> None:
    client().send(message(receiver.url))
    names = receiver.received.pop()[1].keys()
    assert names & {"webhook-id", "webhook-signature"} == {"webhook-id"}
    assert client(secret=[SECRET, OTHER_SECRET]).send(message(receiver.url)) == [None]
    verify(receiver)
    verify(receiver, OTHER_SECRET)
    assert len(receiver.received[0][1]["webhook-signature"].split(" ")) == 2


def test_secrets_by_host(client: Any, receiver: Receiver) -> None:
    sender = client(secret={"127.0.0.1": SECRET})
    found = sender.send(message(receiver.url), message("https://other.example/"))
    assert found[0] is None
    verify(receiver)
    assert type(found[1]) is Refused
    assert "secret has no entry for the host other.example" in str(found[1])


# --- addresses ------------------------------------------------------------------------------------


NO_HOSTS = f"""
    example.com:99999/ example.com/\x00 evil.example%2F.example.com/ a..b/ .example/ ./ a.example../
    {"a" * 64}.example/ {"a." * 127}example/
"""


@cases(
    ("to", "said"),
    [
        ("http://example.com/", "set the option allow_http"),
        ("ftp://example.com/", "expected https"),
        ("example.com/hooks", "no scheme; expected https"),
        ("https:///hooks", "without a host"),
        ("https://user:hunter2@example.com/", "with a user name or password"),
        ("https://example.com/https://evil.example/", "a URL inside a URL"),
        ("https://exa mple.com/", "not a valid URL"),
        *((f"https://{each}", "not a valid URL") for each in NO_HOSTS.split()),
    ],
)
def test_urls_that_no_webhook_has(to: str, said: str) -> None:
    with pytest.raises(outbox.Unrecoverable, match=said) as caught:
        url_of(to, allow_http=False)
    assert "hunter2" not in str(caught.value)


@cases(
    "host",
    "a.example a.example. a_b.example xn--bcher-kva.example bücher.example a 192.0.2.1 "
    f"[2001:db8::1] [::1] [::ffff:192.0.2.1] {'a' * 63}.example".split(),
)
def test_hosts_that_a_webhook_may_have(host: str) -> None:
    assert url_of(f"https://{host}:8443/hooks", allow_http=False).port == 8443


def test_fields_are_percent_encoded_for_the_url() -> None:
    assert Webhook.quote("a/b?c#d@e:ä %") == "a%2Fb%3Fc%23d%40e%3A%C3%A4%20%25"
    assert Webhook.quote("https://a.example/x?y=1") == "https://a.example/x?y=1"
    for path in (".", ".."):
        with pytest.raises(outbox.Unrecoverable, match="would change the URL's path"):
            Webhook.quote(path)


PUBLIC_ADDRESSES = """
    93.184.216.34 1.1.1.1 172.32.0.1 11.0.0.1 2606:4700::1111 64:ff9b::5db8:d822
    ::ffff:93.184.216.34
"""
OTHER_ADDRESSES = """
    0.0.0.0 10.1.2.3 100.64.0.1 127.0.0.1 127.255.0.1 169.254.169.254 172.16.0.1 172.31.255.255
    192.168.1.1 192.0.2.1 198.18.0.1 224.0.0.1 240.0.0.1 255.255.255.255 168.63.129.16 :: ::1
    ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe
    64:ff9b:1::a00:1 fe80::1%eth0 fc00::1 fd00:ec2::254 fec0::1 ff02::1 100::1 2001::1 2001:db8::1
    2002:7f00:1::1 3fff::1 5f00::1
"""


def test_public_addresses() -> None:
    assert [each for each in PUBLIC_ADDRESSES.split() if not is_public(each)] == []
    assert [each for each in OTHER_ADDRESSES.split() if is_public(each)] == []


@cases(
    "host",
    "127.0.0.1 localhost 2130706433 0x7f.1 127.1 0 [::1] [::ffff:127.0.0.1] [64:ff9b::7f00:1] "
    "[::ffff:7f00:1]".split(),
)
def test_no_spelling_of_a_private_address_is_connected_to(
    client: Any, receiver: Receiver, host: str
) -> None:
    sender = client("{headers[url]}", allow_private=False)
    (found,) = sender.send(message(f"http://{host}:{receiver.port}/"))
    assert isinstance(found, (AddressRefused, Refused, outbox.Unrecoverable)), found
    if host in ("127.0.0.1", "localhost", "[::1]"):
        assert isinstance(found, AddressRefused)
    assert receiver.connections == 0


class Network:
    """Names as a test gives them; notes the addresses connected to, and leads to the receiver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        self.answers, self.asked, self.connected = [*answers], list[str](), list[str]()
        self.port = 0
        real, connect = socket.getaddrinfo, httpcore.AnyIOBackend.connect_tcp

        def resolve(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
            if not str(host).endswith(".example"):
                return real(host, port, *args, **kwargs)
            self.asked.append(host)
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(answer, Exception):
                raise answer
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in answer]

        async def connect_tcp(backend: Any, host: str, port: int, *args: Any, **kw: Any) -> Any:
            self.connected.append(host)
            if not self.port:
                raise httpcore.ConnectError("nothing there")
            return await connect(backend, "127.0.0.1", self.port, *args, **kw)

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect_tcp)


PUBLIC, PUBLIC_TOO = "93.184.216.34", "93.184.216.35"
UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_name_is_resolved_once_and_the_checked_address_is_used(
    client: Any, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that gives a private address the second time (rebinding) gets nowhere."""
    network = Network(monkeypatch, [PUBLIC], ["127.0.0.1"])
    network.port = receiver.port
    first, second = (client("{headers[url]}", allow_private=False) for _ in range(2))
    assert first.send(message("http://hooks.example/a")) == [None]
    assert (network.asked, network.connected) == (["hooks.example"], [PUBLIC])
    assert receiver.received[0][1]["host"] == "hooks.example"
    (found,) = second.send(message("http://hooks.example/a"))
    assert isinstance(found, AddressRefused)
    assert str(found).startswith("hooks.example has no public address.")
    assert network.connected == [PUBLIC]


def test_of_several_addresses_the_public_ones_are_tried(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(monkeypatch, ["10.0.0.1", PUBLIC, "127.0.0.1", PUBLIC_TOO])
    (found,) = client("{headers[url]}", allow_private=False).send(message("http://a.example/"))
    assert delay(found) == pytest.approx(3, abs=0.1)
    assert network.connected == [PUBLIC, PUBLIC_TOO]


def test_a_name_that_does_not_exist(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From an event it costs an attempt, so that the event ends; in the settings it does not."""
    Network(monkeypatch, UNKNOWN)
    (found,) = client("{headers[url]}").send(message("https://a.example/"))
    assert type(found) is Refused
    assert str(found) == "a.example:443 cannot be reached: the name a.example does not exist."
    with pytest.raises(BrokerUnavailable, match=r"name a\.example does not exist"):
        client("https://a.example/").send(message("https://a.example/"))
    hosts.clear()
    with pytest.raises(BrokerUnavailable, match=r"name a\.example does not exist"):
        client("https://a.example/").check()


def test_a_name_server_that_is_away_means_that_hosts_are_away(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Network(monkeypatch, socket.gaierror(socket.EAI_AGAIN, "Temporary failure"))
    (found,) = client("{headers[url]}").send(message("https://a.example/"))
    assert delay(found) == pytest.approx(3, abs=0.1)


# --- https ----------------------------------------------------------------------------------------


def test_https_checks_the_certificate_and_the_name(client: Any, tmp_path: Any) -> None:
    good = certificate(tmp_path, host="127.0.0.1")
    with receiving(certificate=good) as receiver:
        sender = client(receiver.url, secret=SECRET, verify=str(good[0]), allow_http=False)
        assert sender.send(*(message(receiver.url, n) for n in range(20))) == [None] * 20
        verify(receiver)
        sender.check()
        stranger = client(receiver.url)
        with pytest.raises(BrokerUnavailable, match="certificate verify failed"):
            stranger.send(message(receiver.url))
        with pytest.raises(BrokerUnavailable, match="certificate verify failed"):
            stranger.check()
        assert len(receiver.received) == 20
    hosts.clear()
    wrong = certificate(tmp_path, host="wrong.example")
    with receiving(certificate=wrong) as receiver:
        with pytest.raises(BrokerUnavailable, match="IP address mismatch"):
            client(receiver.url, verify=str(wrong[0])).send(message(receiver.url))
        assert receiver.received == []


# --- hosts that are away --------------------------------------------------------------------------


def test_503_stops_a_host_for_as_long_as_it_says(
    client: Any, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.answer = lambda path, body: (503, {"retry-after": "30"}, b"closed")
    sender = client("{headers[url]}")
    with receiving() as healthy:
        found = sender.send(
            *(message(receiver.url, n) for n in range(30)), message(healthy.url, 30)
        )
    assert [delay(each) for each in found[:30]] == [pytest.approx(30, abs=1)] * 30
    assert found[30] is None
    assert len(receiver.received) <= 4
    only = client(receiver.url)
    asked = len(receiver.received)
    with pytest.raises(BrokerUnavailable, match="answered 503: closed"):
        only.send(message(receiver.url))
    with pytest.raises(BrokerUnavailable, match="answered 503: closed"):
        only.check()
    assert len(receiver.received) == asked
    now = monotonic()
    monkeypatch.setattr(http_hosts, "monotonic", lambda: now + 31)
    only.check()
    receiver.answer = lambda path, body: (204, {}, b"")
    assert only.send(message(receiver.url)) == [None]
    assert hosts.get(f"127.0.0.1:{receiver.port}") is None


def test_after_its_pause_one_message_tries_a_host(
    client: Any, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = f"127.0.0.1:{receiver.port}"
    hosts.set_away(origin, "away", is_unreachable=False)
    now = monotonic()
    monkeypatch.setattr(http_hosts, "monotonic", lambda: now + 3.5)
    receiver.answer = lambda path, body: (503, {}, b"")
    sender = client("{headers[url]}")
    found = sender.send(*(message(receiver.url, n) for n in range(10)))
    assert {type(each) for each in found} == {outbox.Defer}
    assert len(receiver.received) == 1


def test_a_pause_grows_with_the_time_that_a_host_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(http_hosts, "monotonic", lambda: now[0])
    absences = Hosts()
    pauses = []
    for age in (0, 3, 60, 300, 600, 1200, 86_400):
        now[0] = 1000.0 + age
        pauses.append(absences.set_away("a:1", "away", is_unreachable=True).until - now[0])
    assert pauses == [3, 3, 3, 15, 30, 60, 60]
    assert absences.set_away("a:1", "", is_unreachable=True, retry_after=9999).until - now[0] == 60
    assert absences.absence("a:1") is not None
    now[0] += 60
    assert absences.absence("a:1") is None
    absences.set_back("a:1")
    assert absences.get("a:1") is None


def test_of_too_many_hosts_the_first_is_forgotten() -> None:
    absences, names = Hosts(), [f"a:{n}" for n in range(http_hosts.MAX_HOSTS + 1)]
    for each in names:
        absences.set_away(each, "", is_unreachable=True)
    assert [each for each in names if absences.get(each) is None] == names[:1]


# --- options --------------------------------------------------------------------------------------


def test_a_file_of_certificates_that_is_missing(client: Any, tmp_path: Any) -> None:
    with pytest.raises(BrokerUnavailable, match=r"verify = .* cannot be read"):
        client(verify=str(tmp_path / "absent.pem"))


# --- the pages ------------------------------------------------------------------------------------

PAGE = "how-to/relay-to-webhooks.md"


@database
def test_479_the_receiver_of_the_page_takes_a_webhook_once(
    relay: Any, receiver: Receiver, settings: Any, rf: Any
) -> None:
    relay(receiver.url)
    row = write()
    assert drained(row) == ("DONE", 0)
    ((_, headers, body),) = receiver.received
    settings.SHOP_SECRET = SECRET
    signature = {name: value for name, value in headers.items() if name.startswith("webhook-")}
    with samples.modules(f"{PAGE}#Receive the webhooks") as made:
        receive = made["partner.hooks"].receive
        for sent, status in ((body, 204), (body, 204), (body + b" ", 403)):
            request = rf.post("/", sent, content_type="application/json", headers=signature)
            assert receive(request).status_code == status
    (notified,) = OutboxEvent.objects.filter(event_type="shop.notified")
    assert json.loads(notified.payload) == {"sku": "teapot", "name": "Kännchen"}
