"""The relays to SQS and SNS.

AWS itself is not asked: moto's server on this machine stands in for it. What moto does not do
(refusals of single entries, throttling, hangs) comes from an endpoint of these tests that answers
what it is given. Both speak the real protocol with the real boto3.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

import django_outbox as outbox
from django_outbox.models import OutboxEvent
from django_outbox.relays import BrokerUnavailable, Message
from tests import relay_adapters
from tests.receiver import Receiver, receiving
from tests.relay_messages import Client, drained, kinds, numbered, opener, use_relay, write
from tests.waiting import wait_until

boto3 = pytest.importorskip("boto3")
moto_server = pytest.importorskip("moto.server")

from django_outbox.relays import aws  # noqa: E402
from django_outbox.relays.aws import SNS, SQS, Denied, entry_of, grouped  # noqa: E402
from django_outbox.relays.backend import Refused  # noqa: E402
from tests.cases import cases  # noqa: E402

database = pytest.mark.django_db(transaction=True)

ACCESS = relay_adapters.SQS.ACCESS


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Keep boto3 from the configuration of whoever runs the tests, and from asking EC2."""
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "absent"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def sqs(moto: str) -> Iterator[Any]:
    client = boto3.client("sqs", endpoint_url=moto, **ACCESS)
    yield client
    client.close()


@pytest.fixture
def sns(moto: str) -> Iterator[Any]:
    client = boto3.client("sns", endpoint_url=moto, **ACCESS)
    yield client
    client.close()


@pytest.fixture
def backend() -> Iterator[Any]:
    """Yield a function that opens a backend."""

    def make(kind: Any, endpoint: str, to: str = "", **options: Any) -> Any:
        made = kind(**{**ACCESS, "endpoint_url": endpoint, **options})
        made.to = to
        return made

    with opener(make) as opened:
        yield opened


def queue(sqs: Any, *, fifo: bool = False) -> str:
    name = f"q-{uuid4().hex}"
    if fifo:
        found = sqs.create_queue(QueueName=f"{name}.fifo", Attributes={"FifoQueue": "true"})
    else:
        found = sqs.create_queue(QueueName=name)
    return str(found["QueueUrl"])


def received(sqs: Any, url: str, count: int = 1) -> list[Any]:
    """Return the messages of a queue, deleted, once there are so many; in their order."""
    found: list[Any] = []

    def fetch() -> bool:
        answer = sqs.receive_message(
            QueueUrl=url,
            MaxNumberOfMessages=10,
            MessageAttributeNames=["All"],
            AttributeNames=["All"],
        )
        some = answer.get("Messages", [])
        if some:
            entries = [
                {"Id": str(n), "ReceiptHandle": each["ReceiptHandle"]}
                for n, each in enumerate(some)
            ]
            sqs.delete_message_batch(QueueUrl=url, Entries=entries)
        found.extend(some)
        return len(found) >= count

    wait_until(fetch, within=60)
    assert len(found) == count
    return found


def attributes(message: Any) -> dict[str, str]:
    return {name: each["StringValue"] for name, each in message["MessageAttributes"].items()}


def message(to: str, number: int = 0, body: bytes = b'{"n":1}', **fields: Any) -> Message:
    return numbered(number, to=to, body=body, **fields)


# --- through the outbox ---------------------------------------------------------------------------


@pytest.fixture
def relay(settings: Any, moto: str) -> Any:
    """Return a function that configures a relay."""
    options = {**ACCESS, "endpoint_url": moto}
    return lambda backend, to, **own: use_relay(
        settings, f"aws.{backend}", to, own.pop("OPTIONS", options), **own
    )


@database
def test_a_fifo_queue_keeps_order_by_key_and_drops_repeats(relay: Any, sqs: Any) -> None:
    url = queue(sqs, fifo=True)
    relay("SQS", url)
    rows = [write(key="order 7") for _ in range(3)]
    outbox.drain()
    OutboxEvent.objects.update(status=OutboxEvent.Status.DEAD)
    assert OutboxEvent.objects.all().replay() == 3
    outbox.drain()
    assert {*OutboxEvent.objects.values_list("status", flat=True)} == {OutboxEvent.Status.DONE}
    found = received(sqs, url, 3)
    assert [attributes(each)["event-id"] for each in found] == [row.pk for row in rows]
    assert [each["Attributes"]["MessageDeduplicationId"] for each in found] == [
        row.pk for row in rows
    ]
    groups = {each["Attributes"]["MessageGroupId"] for each in found}
    assert len(groups) == 1
    assert len(groups.pop()) == 64  # a hash: SQS allows no space in it


@database
def test_sns_reaches_a_subscribed_fifo_queue(relay: Any, sqs: Any, sns: Any) -> None:
    url = queue(sqs, fifo=True)
    topic = sns.create_topic(Name=f"t-{uuid4().hex}.fifo", Attributes={"FifoTopic": "true"})
    arn = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]
    sns.subscribe(
        TopicArn=topic["TopicArn"],
        Protocol="sqs",
        Endpoint=arn["QueueArn"],
        Attributes={"RawMessageDelivery": "true"},
    )
    relay("SNS", topic["TopicArn"])
    row = write(key="k7")
    assert drained(row) == ("DONE", 0)
    (found,) = received(sqs, url)
    assert found["Attributes"]["MessageGroupId"] == "k7"
    assert found["Attributes"]["MessageDeduplicationId"] == row.pk


# --- the backend ----------------------------------------------------------------------------------


def test_100_messages_are_10_calls(backend: Any, sqs: Any, moto: str) -> None:
    url, calls = queue(sqs), []
    sender = backend(SQS, moto, timeout=60)  # moto is slow on a busy machine
    sender.backend._client.meta.events.register(
        "before-call.sqs.SendMessageBatch",
        lambda params, **_: calls.append(len(json.loads(params["body"])["Entries"])),
    )
    assert sender.publish([message(url, n) for n in range(100)], 60) == [None] * 100
    assert calls == [10] * 10


def test_calls_hold_ten_messages_of_one_destination_and_256_kib() -> None:
    def sizes(messages: list[Message]) -> list[list[int]]:
        entries = [entry_of("sqs", each) for each in messages]
        return [[entries.index(each) for each in call] for call in grouped(entries)]

    assert sizes([message("a", n) for n in range(12)]) == [[*range(10)], [10, 11]]
    assert sizes([message("ab"[n % 2], n) for n in range(4)]) == [[0, 2], [1, 3]]
    big = b"x" * 100_000
    assert sizes([message("a", n, big) for n in range(5)]) == [[0, 1], [2, 3], [4]]
    huge = message("a", 1, b"x" * 500_000)
    assert sizes([message("a"), huge, message("a", 2)]) == [[0], [1], [2]]


def test_headers_beyond_ten_attributes_are_one_of_json() -> None:
    ours = {"event-id": "e", "event-type": "t", "event-key": "k"}
    own = {f"own-{n}": f"ä{n}" for n in range(9)}
    given = entry_of("sqs", message("a", headers={**own, **ours})).given["MessageAttributes"]
    assert len(given) == 10
    assert {"event-id", "event-type", "event-key", "content-type"} < given.keys()
    rest = json.loads(given["headers"]["StringValue"])
    assert rest == {f"own-{n}": f"ä{n}" for n in range(5, 9)}
    assert {each["DataType"] for each in given.values()} == {"String"}


def test_names_and_values_that_aws_refuses_are_in_the_json() -> None:
    odd = {"aws.x": "1", "a..b": "2", "ümlaut": "3", "empty": "", "null": "\0"}
    odd |= {"headers": "4", ".a": "5", "a.": "6", "with space": "7"}
    given = entry_of("sqs", message("a", headers={"event-id": "e", **odd}))
    found = given.given["MessageAttributes"]
    assert found.keys() == {"event-id", "content-type", "headers"}
    assert json.loads(found["headers"]["StringValue"]) == odd


@pytest.mark.parametrize("group", ["k" * 128, "k" * 129, "ä", "a b"])
def test_group_ids_that_aws_refuses_are_hashed(group: str) -> None:
    given = entry_of("sqs", message("a.fifo", group=group)).given
    assert given["MessageGroupId"] == group or len(given["MessageGroupId"]) == 64
    assert (given["MessageGroupId"] == group) == (group == "k" * 128)
    assert given["MessageDeduplicationId"] == "e0"
    alone = entry_of("sqs", message("a.fifo")).given
    assert alone["MessageGroupId"] == "e0"
    assert "MessageGroupId" not in entry_of("sqs", message("a")).given


TO = {SQS: "http://x/q", SNS: "arn:aws:sns:eu-central-1:123456789012:t"}
NO_ARNS = ["topic", "arn:aws:sqs:eu-central-1:123456789012:a", "arn:aws:sns:eu-central-1:1:a"]
NO_QUEUES = ["a b", "a.b", "q" * 81, "ftp://a"]


@cases(
    ("service", "to"),
    [*(("sqs", each) for each in NO_QUEUES), *(("sns", each) for each in NO_ARNS)],
)
def test_a_destination_that_cannot_be_is_refused_before_it_is_asked(service: str, to: str) -> None:
    with pytest.raises(outbox.Unrecoverable, match=r"TO is .*; expected the"):
        entry_of(service, message(to))


def test_checks(backend: Any, sqs: Any, sns: Any, moto: str) -> None:
    url, topic = queue(sqs), sns.create_topic(Name="t")["TopicArn"]
    backend(SQS, moto, url).check()
    backend(SQS, moto, "{event_type}").check()
    backend(SNS, moto, topic).check()
    backend(SNS, moto).check()
    with pytest.raises(Refused, match="NotFound"):
        backend(SNS, moto, topic + "x").check()


def test_without_a_region_or_credentials_it_is_away(moto: str, backend: Any) -> None:
    with pytest.raises(BrokerUnavailable, match="specify a region"):
        Client(SQS())
    with pytest.raises(BrokerUnavailable, match="profile"):
        Client(SQS(profile_name="absent"))
    sender = Client(SQS(region_name="eu-central-1", endpoint_url=moto))
    try:
        with pytest.raises(BrokerUnavailable, match="Unable to locate credentials"):
            sender.publish([message("q")])
        with pytest.raises(BrokerUnavailable, match="Unable to locate credentials"):
            sender.check()
    finally:
        sender.close()


# --- what moto does not do: answers that are given ------------------------------------------------


class Endpoint:
    """An endpoint of SQS that gives each call the answer of ``answer``."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver, self.url, receiver.answer = receiver, receiver.origin, self._answer
        self.answer: Any = lambda entries: (200, done(entries))

    @property
    def calls(self) -> int:
        return len(self.receiver.received)

    def _answer(self, path: str, body: bytes) -> Any:
        status, found = self.answer(json.loads(body).get("Entries", []))
        return status, {}, json.dumps(found).encode()  # 0: the connection ends without an answer


def done(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {"Successful": [{"Id": each["Id"], "MessageId": "m"} for each in entries], "Failed": []}


def fault(code: str, text: str = "no") -> dict[str, str]:
    return {"__type": f"com.amazonaws.sqs#{code}", "message": text}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with receiving() as receiver:
        yield Endpoint(receiver)


def test_entries_that_failed_have_their_own_outcomes(backend: Any, endpoint: Endpoint) -> None:
    def answer(entries: list[dict[str, Any]]) -> Any:
        failed = [
            {"Id": "1", "SenderFault": True, "Code": "InvalidMessageContents", "Message": "odd"},
            {"Id": "2", "SenderFault": False, "Code": "InternalError", "Message": "try again"},
            {"Id": "3", "SenderFault": True, "Code": "KMS.DisabledException"},
            {"Id": "4", "SenderFault": False, "Code": "RequestThrottled"},
        ]
        return 200, {**done(entries[:1] + entries[6:]), "Failed": failed}

    endpoint.answer = answer
    found = backend(SQS, endpoint.url).publish([message("http://x/q", n) for n in range(8)])
    assert [type(each) for each in found] == [
        type(None),
        outbox.Unrecoverable,
        Refused,
        Refused,
        outbox.Defer,
        Refused,
        type(None),
        type(None),
    ]
    assert str(found[2]) == "AWS refused the message with InternalError: try again"
    assert found[4].delay == 1


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "RequestThrottled", outbox.Defer),
        (400, "ThrottlingException", outbox.Defer),
        (403, "AccessDeniedException", Denied),
        (400, "QueueDoesNotExist", Refused),
        (400, "KmsDisabled", Refused),
        (400, "InvalidMessageContents", outbox.Unrecoverable),
        (403, "ExpiredTokenException", BrokerUnavailable),
        (403, "RequestTimeTooSkewed", BrokerUnavailable),
        (403, "MissingAuthenticationTokenException", BrokerUnavailable),
        (400, "IncompleteSignatureException", BrokerUnavailable),
        (403, "InvalidSignatureException", BrokerUnavailable),
        (403, "InvalidClientTokenId", BrokerUnavailable),
        (500, "InternalFailure", BrokerUnavailable),
        (503, "ServiceUnavailable", BrokerUnavailable),
        (0, "", BrokerUnavailable),
    ],
)
def test_what_a_call_fails_with(
    backend: Any, endpoint: Endpoint, status: int, code: str, expected: Any
) -> None:
    """All messages of the call have the outcome; one whole batch that is away raises it."""
    endpoint.answer = lambda entries: (status, fault(code))
    sender, messages = backend(SQS, endpoint.url), [message("http://x/q", n) for n in range(3)]
    if expected is BrokerUnavailable:
        with pytest.raises(BrokerUnavailable, match=code or None) as caught:
            sender.publish(messages)
        assert "sesame" not in str(caught.value)
    else:
        assert [type(each) for each in sender.publish(messages)] == [expected] * 3


def test_a_call_refused_for_one_message_is_repeated_for_each(
    backend: Any, endpoint: Endpoint
) -> None:
    def answer(entries: list[dict[str, Any]]) -> Any:
        if any(attributes(each)["event-id"] == "e2" for each in entries):
            return 400, fault("BatchRequestTooLong")
        return 200, done(entries)

    endpoint.answer = answer
    found = backend(SQS, endpoint.url).publish([message("http://x/q", n) for n in range(4)])
    assert kinds(found) == {"": 3, "Unrecoverable": 1}
    assert found[2] is not None
    assert endpoint.calls == 5


def test_an_outage_in_mid_batch_leaves_what_was_confirmed(backend: Any, endpoint: Endpoint) -> None:
    def answer(entries: list[dict[str, Any]]) -> Any:
        first = entries[0]["Id"] == "0"
        return (200, done(entries)) if first else (500, fault("InternalFailure"))

    endpoint.answer = answer
    found = backend(SQS, endpoint.url).publish([message("http://x/q", n) for n in range(30)])
    assert found[:10] == [None] * 10
    assert {type(each) for each in found[10:]} == {BrokerUnavailable}


@cases("kind", [SQS, SNS])
@cases(
    ("status", "body"),
    [
        (200, b""),
        (200, b'{"Succ'),
        (200, b"<PublishBatchResponse><Pub"),
        (200, b"<html></html>"),
        (302, b"<html>log in</html>"),
        (400, b""),
        (400, b'{"__ty'),
        (403, b"<html>no</html>"),
        (404, b"{}"),
    ],
)
def test_an_answer_that_is_not_a_whole_one_of_aws_is_an_outage(
    backend: Any, endpoint: Endpoint, kind: Any, status: int, body: bytes
) -> None:
    endpoint.receiver.answer = lambda path, _: (status, {}, body)
    sender = backend(kind, endpoint.url, TO[kind])
    with pytest.raises(BrokerUnavailable):
        sender.publish([message(TO[kind], n) for n in range(3)])
    with pytest.raises(BrokerUnavailable):
        sender.check()


def test_a_call_without_an_answer_costs_no_attempt_though_a_later_one_has_one(
    backend: Any, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the endpoint comes back in mid-batch."""
    monkeypatch.setattr(aws, "THREADS", 1)
    ended = threading.Event()

    def answer(entries: list[dict[str, Any]]) -> Any:
        if attributes(entries[0])["event-id"] == "e0":
            ended.wait(30)
        return 200, done(entries)

    endpoint.answer = answer
    sender = backend(SQS, endpoint.url, timeout=1)
    found = sender.publish([message("http://x/q", n) for n in range(30)])
    ended.set()
    assert {type(each) for each in found[:10]} == {BrokerUnavailable}
    assert found[10:] == [None] * 20


def test_an_endpoint_that_hangs_confirms_nothing_and_nothing_is_sent_later(
    backend: Any, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 calls are under way; the other 12 are not begun when it is too late for an answer."""
    # A clock by which it is too late for further calls once eight have begun.
    monkeypatch.setattr(aws, "monotonic", lambda: 50.0 if endpoint.calls >= 8 else 0.0)
    endpoint.receiver.hold.clear()
    sender = backend(SQS, endpoint.url, timeout=6)  # seconds; 8 threads begin in a part of it
    with pytest.raises(BrokerUnavailable):
        sender.session.publish([message("http://x/q", n) for n in range(200)], 100.0)
    calls = endpoint.calls
    endpoint.receiver.hold.set()
    sender.close()
    assert endpoint.calls == calls == 8


def test_a_denied_check_has_reached_aws(backend: Any, endpoint: Endpoint) -> None:
    sender = backend(SQS, endpoint.url)
    endpoint.answer = lambda entries: (403, fault("AccessDeniedException"))
    sender.check()
    endpoint.answer = lambda entries: (400, fault("ThrottlingException"))
    sender.check()
    endpoint.answer = lambda entries: (403, fault("ExpiredTokenException", "token expired"))
    with pytest.raises(BrokerUnavailable, match="ExpiredTokenException: token expired"):
        sender.check()
