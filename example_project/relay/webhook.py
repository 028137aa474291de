"""Relay to a webhook, signed as Standard Webhooks say."""

from __future__ import annotations

from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

import requests
from standardwebhooks import Webhook as Signer

import django_outbox as outbox
from django_outbox import Dead, RetryAfter, Unrecoverable
from example_project.relay import envelope

TIMEOUT = (3.05, 15)  # seconds to connect, and for the answer to begin
LATER = (425, 429, 503)
A_DAY = 86400  # seconds; a receiver may not put an event off for longer


class Webhook:
    def __init__(self, url: str, secret: str) -> None:
        self.url, self.signer = url, Signer(secret)

    def __call__(self, event: outbox.Event) -> Dead | None:
        now, text = datetime.now(timezone.utc), envelope.body(event).decode()
        answer = requests.post(
            self.url,
            data=text.encode(),
            headers={
                "content-type": "application/json",
                "event-type": event.event_type,
                "webhook-id": event.event_id,  # the receiver's idempotency key
                "webhook-timestamp": str(int(now.timestamp())),
                "webhook-signature": self.signer.sign(event.event_id, now, text),
            },
            timeout=TIMEOUT,
            allow_redirects=False,  # a signed body goes to the address agreed upon only
        )
        return self.judge(answer)

    def judge(self, answer: requests.Response) -> Dead | None:
        """Turn the status into an answer; a status that says nothing is left to the retries."""
        if 200 <= answer.status_code < 300:
            return None
        said = f"{self.url} said {answer.status_code}: {answer.text[:200]}"
        if answer.status_code == 410:
            return Dead(f"{said} (the receiver has gone for good)")
        if answer.status_code in LATER and (wait := seconds(answer.headers.get("retry-after"))):
            raise RetryAfter(wait, said)
        if answer.status_code in LATER or answer.status_code >= 500 or answer.status_code == 408:
            raise ConnectionError(said)
        raise Unrecoverable(said)


def seconds(retry_after: str | None) -> float:
    """Read the header Retry-After, which is a number of seconds or a date; 0: it says nothing."""
    text = retry_after or ""
    try:
        if text.isdecimal():
            wait = float(text)
        else:
            wait = (parsedate_to_datetime(text) - datetime.now(timezone.utc)).total_seconds()
    except (TypeError, ValueError):
        return 0.0
    return min(max(wait, 0.0), A_DAY)
