"""``Event``: what is written and what listeners see, with every rule that needs no database."""

from __future__ import annotations

from .event import ABSENT, Event, leased
from .ids import least_id, made_at, new_id
from .rules import (
    ACTIVE,
    GLOBAL,
    LENGTHS,
    NO_HEADERS,
    RECEIVED_LENGTHS,
    aggregate_key,
    as_utc,
    exact_text,
    identity,
    read_only_headers,
    stored_instant,
    type_name,
)
from .text import check_text, decode, decode_headers, encode, encode_headers, fit
from .typed import Declaration, declared

__all__ = [
    "ABSENT",
    "ACTIVE",
    "GLOBAL",
    "LENGTHS",
    "NO_HEADERS",
    "RECEIVED_LENGTHS",
    "Declaration",
    "Event",
    "aggregate_key",
    "as_utc",
    "check_text",
    "decode",
    "decode_headers",
    "declared",
    "encode",
    "encode_headers",
    "exact_text",
    "fit",
    "identity",
    "least_id",
    "leased",
    "made_at",
    "new_id",
    "read_only_headers",
    "stored_instant",
    "type_name",
]
