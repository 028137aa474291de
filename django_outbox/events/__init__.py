"""Events: the class ``Event``, its ids, its JSON and its validation; all without a database."""

from __future__ import annotations

from .arguments import ABSENT, least_id, new_id, suggest_names
from .event import Event, current_event, delivering, event_from_row
from .json_text import check_text, decode, encode, encode_headers, fit
from .typed import Declaration, check_payload, class_fault, declared
from .validation import (
    GLOBAL,
    LANE_LENGTH,
    LENGTHS,
    RECEIVED_LENGTHS,
    ROW_ID_LENGTH,
    SLOT_PREFIX,
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
    is_slot,
    read_only_headers,
    slot_of,
    spellings,
    split_stream,
    stored_instant,
    stream_of,
    type_text,
    unrouted,
)
