"""Amazon SQS and SNS: queues and topics of AWS, by calls of ten messages. Needs the extra ``aws``.

What an error means:

- The endpoint cannot be reached, does not answer in time, answers 5xx or not as AWS does (a proxy's
  page, an answer that is cut off), or refuses the credentials: ``BrokerUnavailable``.
- Throttling: the message is deferred for a second, and no attempt is spent.
- A message that AWS cannot take (contents, size, parameters): ``Unrecoverable``, for it alone.
- Anything else about a queue or topic (it does not exist, no permission, its KMS key is disabled):
  ``Refused``; it costs an attempt and the retry policy decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any, ClassVar, Final

import boto3
from botocore import exceptions
from botocore.config import Config

from ..exceptions import BrokerUnavailable, Unrecoverable
from .aws_messages import THROTTLED, Denied, Entry, entry_of, grouped, meaning, shown
from .backend import NOT_SENT, Backend, Message, Outcome, Refused, Together

THREADS: Final = 8  # calls at a time
CONNECT_SHARE: Final = 1 / 4  # of the timeout, for a connection; half of it is for the answer


class _Client(Backend):
    """What SQS and SNS have in common: the client, the calls and their outcomes."""

    service: ClassVar[str]
    # AWS. and Amazon. set prices and senders of text messages and times to live; the other two make
    # clients for large payloads take the body for the address of one.
    commands: ClassVar[re.Pattern[str]] = re.compile(
        r"(?:aws|amazon)\..*|ExtendedPayloadSize|SQSLargePayloadSize", re.IGNORECASE
    )

    def __init__(
        self,
        *,
        timeout: Any = 10.0,
        profile_name: str | None = None,
        region_name: str | None = None,
        endpoint_url: str | None = None,
        aws_access_key_id: str | None = None,
        aws_secret_access_key: str | None = None,
        aws_session_token: str | None = None,
        verify: bool | str | None = None,
    ) -> None:
        super().__init__(timeout=timeout)
        self._session_options: dict[str, Any] = {
            "profile_name": profile_name,
            "region_name": region_name,
            "aws_access_key_id": aws_access_key_id,
            "aws_session_token": aws_session_token,
            "aws_secret_access_key": aws_secret_access_key,
        }
        for name, value in (*self._session_options.items(), ("endpoint_url", endpoint_url)):
            if value is not None and not (isinstance(value, str) and value):
                raise ValueError(
                    f"{name} is of type {type(value).__name__}; expected a str that is not empty, "
                    "or None for what boto3 finds itself."
                )
        if bool(aws_access_key_id) != bool(aws_secret_access_key):
            raise ValueError("aws_access_key_id and aws_secret_access_key go together; give both.")
        self._client_options = {"endpoint_url": endpoint_url, "verify": verify}
        self._resolved: dict[str, str] = {}  # URLs by name

    def open(self) -> None:
        """Make the client; the first call connects."""
        config = Config(
            connect_timeout=self.timeout * CONNECT_SHARE,
            read_timeout=self.timeout / 2,
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=THREADS + 2,  # and two for checks
        )
        try:
            session = boto3.Session(**self._session_options)
            self._client = session.client(self.service, config=config, **self._client_options)
        except (exceptions.BotoCoreError, ValueError) as error:
            raise BrokerUnavailable(f"The options of {self.service} do not fit: {error}") from None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=f"outbox-{self.service}")

    def close(self) -> None:
        """Give the connections and threads up; a call that waits for AWS ends with its timeout."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def prepare(self, message: Message) -> Entry:
        """Return what is sent of a message; ``Unrecoverable`` if AWS cannot take it."""
        return entry_of(self.service, message)

    def publish(self, messages: Sequence[Entry], deadline: float) -> list[Outcome]:
        """Send messages by calls of up to ten, several at a time; return an outcome for each.

        A call begins in the first quarter of the time until ``deadline``, because it may take the
        rest. ``publish`` waits for calls that have begun, so that none sends anything later.
        """
        last_start = (3 * monotonic() + deadline) / 4
        for index, each in enumerate(messages):
            each.given["Id"] = str(index)
        calls = [self._threads.submit(self._call, each, last_start) for each in grouped(messages)]
        outcomes: dict[str, Outcome] = {}
        for call in calls:
            outcomes |= call.result()
        found = [outcomes[each.given["Id"]] for each in messages]
        # What was not sent because others waited for an answer in vain shares their outcome.
        away = next((each for each in found if isinstance(each, BrokerUnavailable)), NOT_SENT)
        return [away if each is NOT_SENT else each for each in found]

    def check(self) -> None:
        """Make the smallest call. That AWS denies it is an answer, too: it may be forbidden.

        If ``TO`` names one queue or topic, ask for that one, so that its absence shows.
        """
        try:
            self._ask("" if "{" in self.to or not self.to else self._destination(self.to))
        except Exception as error:  # noqa: BLE001 - the parser of answers raises several kinds
            found = _outcome(error)
            if found is not THROTTLED and not isinstance(found, Denied):
                raise found from None

    def _call(self, entries: list[Entry], last_start: float) -> dict[str, Outcome]:
        """Send one call's entries; return what became of each by its id."""
        ids = [each.given["Id"] for each in entries]
        if monotonic() > last_start:
            return dict.fromkeys(ids, NOT_SENT)
        try:
            destination = self._destination(entries[0].to)
            answer = self._send(destination, [each.given for each in entries])
        except Exception as error:  # noqa: BLE001 - of this call alone
            outcome = _outcome(error)
            is_of_one = isinstance(outcome, Unrecoverable)
            return dict.fromkeys(ids, Together(outcome) if is_of_one else outcome)
        found: dict[str, Outcome] = dict.fromkeys(
            each["Id"] for each in answer.get("Successful", ())
        )
        for each in answer.get("Failed", ()):
            found[each["Id"]] = meaning(each, "AWS refused the message with")
        # botocore takes a body that is cut off for an answer that names no message.
        kind = Refused if found else BrokerUnavailable
        return {**dict.fromkeys(ids, kind("AWS answered without naming the message.")), **found}

    def _destination(self, to: str) -> str:
        return to

    def _send(self, destination: str, entries: list[Any]) -> Any:
        raise NotImplementedError

    def _ask(self, destination: str) -> None:
        raise NotImplementedError


class SQS(_Client):
    """Sends to Amazon SQS. ``TO`` is the URL of a queue, or its name in the account's region."""

    service: ClassVar[str] = "sqs"

    def _destination(self, to: str) -> str:
        if "://" in to:
            return to
        if to not in self._resolved:
            self._resolved[to] = self._client.get_queue_url(QueueName=to)["QueueUrl"]
        return self._resolved[to]

    def _send(self, destination: str, entries: list[Any]) -> Any:
        return self._client.send_message_batch(QueueUrl=destination, Entries=entries)

    def _ask(self, destination: str) -> None:
        if destination:
            asked = {"QueueUrl": destination, "AttributeNames": ["QueueArn"]}
            _ = self._client.get_queue_attributes(**asked)["Attributes"]  # none: not AWS's answer
        else:
            self._client.list_queues(MaxResults=1)


class SNS(_Client):
    """Publishes to Amazon SNS. ``TO`` is the ARN of a topic."""

    service: ClassVar[str] = "sns"

    def _send(self, destination: str, entries: list[Any]) -> Any:
        return self._client.publish_batch(TopicArn=destination, PublishBatchRequestEntries=entries)

    def _ask(self, destination: str) -> None:
        if destination:
            self._client.get_topic_attributes(TopicArn=destination)
        else:
            self._client.list_topics()


# --- outcomes ------------------------------------------------------------------------------------


def _outcome(error: Exception) -> Any:
    if isinstance(error, exceptions.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return meaning(error.response.get("Error", {}), "AWS answered", status=int(status))
    said = shown(str(error))
    if isinstance(error, exceptions.ParamValidationError):
        return Unrecoverable(said)
    if not isinstance(error, exceptions.BotoCoreError):  # of the parser of answers
        said = f"The endpoint did not answer as AWS does: {type(error).__name__}: {said}"
    # A call that AWS does not answer is not the fault of its messages, though a later one may be
    # answered: the endpoint has come back by then.
    return BrokerUnavailable(said)
