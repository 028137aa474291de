"""Events: the class ``Event``, its ids, its JSON and its validation; all without a database."""

from __future__ import annotations

from .arguments import ABSENT, suggest_names
from .event import Event, current_event, delivering, event_from_row
from .ids import least_id, new_id
from .json_text import check_text, decode, encode, encode_headers, fit
from .typed import Declaration, check_payload, class_fault, declared
from .validation import (
    GLOBAL,
    LANE_LENGTH,
    LENGTHS,
    RECEIVED_LENGTHS,
    ROW_ID_LENGTH,
    STREAM_LENGTH,
    UNROUTED_LANE,
    aggregate_key,
    aggregate_label,
    as_utc,
    delay,
    event_label,
    exact_text,
    identity,
    instant,
    read_only_headers,
    split_stream,
    stored_instant,
    stream_of,
    type_name,
    unrouted,
)

__all__ = [
    "ABSENT",
    "GLOBAL",
    "LANE_LENGTH",
    "LENGTHS",
    "RECEIVED_LENGTHS",
    "ROW_ID_LENGTH",
    "STREAM_LENGTH",
    "UNROUTED_LANE",
    "Declaration",
    "Event",
    "aggregate_key",
    "aggregate_label",
    "as_utc",
    "check_payload",
    "check_text",
    "class_fault",
    "current_event",
    "decode",
    "delay",
    "declared",
    "delivering",
    "encode",
    "event_label",
    "encode_headers",
    "exact_text",
    "fit",
    "identity",
    "instant",
    "least_id",
    "event_from_row",
    "new_id",
    "read_only_headers",
    "split_stream",
    "stored_instant",
    "stream_of",
    "suggest_names",
    "unrouted",
    "type_name",
]
