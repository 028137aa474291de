"""Search box of the event list: words such as ``tenant:acme``, all of which an event must match."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

from django.db.models import F, Q, Value
from django.db.models.functions import Concat, Lower, Right, StrIndex, Substr
from django.db.models.lookups import Exact, GreaterThan
from django.utils.translation import gettext

from ..conf import current
from ..events import encode_headers
from ..inspection.status import ERROR_LENGTH
from ..models.fields import begins_with
from . import redaction
from .state_filter import STATES

ID_START: Final = re.compile(r"[0-9A-HJKMNP-TV-Z]{6,25}", re.ASCII)  # of a ULID, not all of it
AFTER_IDS: Final = "~"  # sorts after every character of a ULID
OBJECT: Final = re.compile(r'([^\s:"]+):(\S.*)', re.DOTALL)  # order:17
AGGREGATE: Final = re.compile(r"((?:[^\\:]|\\.)+):(.+)", re.DOTALL)  # as aggregate_key writes it
CLASS_NAME: Final = re.compile(r"[\w.]+")
TRACE_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
# A word, with a value in quotes or without; or a text in quotes; or any other text.
TOKEN: Final = re.compile(r'(?:(\w+):)?"((?:[^"]|"")*)"(?!\S)|(?:(\w+):)?(\S*)')
LIKENESS: Final = 0.8  # of an unknown word to a known one, for a suggestion


class SearchError(ValueError):
    """The search cannot be understood. The message, which is translated, says why."""


class Place(NamedTuple):
    """A column in which a text may be, and the condition that it is there."""

    column: str
    condition: Q


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A text that an event has as a whole in at least one of some columns."""

    text: str
    places: tuple[Place, ...]

    exact: Q | None = None  # if an event has this, no other place is searched

    @property
    def condition(self) -> Q:
        return either(self.places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A parsed search: the conditions of its words, and terms that an index may find."""

    condition: Q = field(default_factory=Q)
    terms: tuple[Term, ...] = ()
    state: str | None = None
    has_error: bool = False  # without a state, only dead events are searched for it


class _Token(NamedTuple):
    name: str  # before a colon; "" if there is none
    value: str
    text: str  # as typed, without quotes
    is_quoted: bool

    @property
    def word(self) -> Word | None:
        return WORDS.get(self.name.casefold())


def parse(text: str) -> Search:
    """Parse what a user typed; raise ``SearchError`` if it has an unknown word or a bad value.

    Text without any word is one term, which may contain spaces.
    """
    if "\0" in text:  # PostgreSQL rejects NUL
        raise SearchError(gettext("The search contains a character that no event can have."))
    tokens, found = [*_tokens(text.strip())], Search()
    rest = [each for each in tokens if each.word is None]
    for each in tokens:
        found = found if each.word is None else _add_word(found, each.word, each)
    for each in rest:
        _suggest_word(each.name)
    if not rest:
        return found
    if len(rest) == 1:
        return replace(found, terms=(*found.terms, _free_term(rest[0])))
    words = len(rest) < len(tokens)
    joined = " ".join(each.text for each in rest) if words else text.strip()
    return replace(found, terms=(*found.terms, _free_term(_Token("", joined, joined, False))))


def either(places: Iterable[Place]) -> Q:
    """Return the condition that at least one of the places has its text."""
    found = Q()
    for each in places:
        found |= each.condition
    return found


def quoted(value: str) -> str:
    """Return a value as a word's value, in quotes if it needs them."""
    return value if re.fullmatch(r'[^\s"]+', value) else '"{}"'.format(value.replace('"', '""'))


def _tokens(text: str) -> Iterator[_Token]:
    position = 0
    while position < len(text):
        match = TOKEN.match(text, position)
        assert match is not None
        typed, position = match[0], match.end()
        while text[position : position + 1].isspace():
            position += 1
        is_quoted = match[2] is not None
        name = (match[1] if is_quoted else match[3]) or ""
        value = match[2].replace('""', '"') if is_quoted else match[4] or ""
        if is_quoted:
            typed = f"{name}:{value}" if name else value
        yield _Token(name, value, typed, is_quoted)


def _add_word(search: Search, word: Word, token: _Token) -> Search:
    if not token.value or (token.value.startswith('"') and not token.is_quoted):
        text = gettext("“%(word)s” has no value, or an open quote. Example: %(example)s")
        raise SearchError(text % {"word": token.text, "example": word.example})
    return word.add(search, token.value)


def _suggest_word(name: str) -> None:
    if near := get_close_matches(name.casefold(), WORDS, n=1, cutoff=LIKENESS):
        text = gettext(
            "“%(unknown)s:” is not a search word. Did you mean “%(known)s:”? To search for the "
            "text itself, put it in quotes."
        )
        raise SearchError(text % {"unknown": name, "known": near[0]})


def _free_term(token: _Token) -> Term:
    """Return the term of other text than a word: an id, a key, an object such as order:17."""
    text = token.text
    exact = Q(event_id=text) | Q(unique_key=text)
    places = [Place("key", Q(key=text))]
    if ID_START.fullmatch(text):
        places.append(_id_start(text))
    is_phrase = token.is_quoted and not token.name
    if not is_phrase and (match := OBJECT.fullmatch(text)):
        places.append(_object(match[1], match[2]))
    else:
        places += [
            Place("aggregate_id", Q(aggregate_id=text)),
            Place("tenant_id", Q(tenant_id=text)),
        ]
    return Term(text=text, places=tuple(places), exact=exact)


def _id_start(text: str) -> Place:
    return Place("event_id", Q(event_id__gte=text, event_id__lt=text + AFTER_IDS))


def _object(kind: str, pk: str) -> Place:
    """Find ``order`` ``17`` whether the aggregate type is ``order`` or ``shop.Order``."""
    lower = kind.lower()
    last_part = Right(Lower("aggregate_type"), len(lower) + 1)
    named = Q(aggregate_type=kind) | Q(Exact(Lower("aggregate_type"), Value(lower)))
    return Place("aggregate_id", Q(aggregate_id=pk) & (named | Q(Exact(last_part, f".{lower}"))))


# --- words --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the search box: how it changes the search, and an example."""

    add: Callable[[Search, str], Search]
    example: str


def _with_term(search: Search, text: str, *places: Place) -> Search:
    return replace(search, terms=(*search.terms, Term(text=text, places=places)))


def _with(search: Search, condition: Any, **changes: Any) -> Search:
    return replace(search, condition=search.condition & Q(condition), **changes)


def _column(name: str) -> Callable[[Search, str], Search]:
    def add(search: Search, value: str) -> Search:
        return _with_term(search, value, Place(name, Q(**{name: value})))

    return add


def _event_id(search: Search, value: str) -> Search:
    return _with_term(search, value, _id_start(value))


def _aggregate(search: Search, value: str) -> Search:
    """Parse ``shop.Order:17`` or an id alone; a colon in the type is escaped, as in a key."""
    match = AGGREGATE.fullmatch(value)
    if match is None:
        return _with_term(search, value, Place("aggregate_id", Q(aggregate_id=value)))
    return _with_term(search, value, _object(re.sub(r"\\(.)", r"\1", match[1]), match[2]))


def _type(search: Search, value: str) -> Search:
    start = value.removesuffix("*")
    if "*" in start or not start:
        raise SearchError(
            gettext("“type:%s” is not possible: write one type, or its start and then *.") % value
        )
    if start == value:
        return _with(search, Q(event_type=value))
    return _with(search, begins_with("event_type", start))


def _queue(search: Search, value: str) -> Search:
    return _with(search, Q(queue=value))


def _state(search: Search, value: str) -> Search:
    if value not in STATES:
        text = gettext("There is no state “%(state)s”. The states are: %(states)s.")
        raise SearchError(text % {"state": value, "states": ", ".join(STATES)})
    if search.state not in (None, value):
        raise SearchError(gettext("A search can have only one “state:”."))
    return _with(search, STATES[value].where, state=value)


def _error(search: Search, value: str) -> Search:
    """Search the first characters of the error; with REDACT only its class, and as a whole.

    Text that REDACT may hide must not be guessed letter by letter.
    """
    if current().REDACT:
        if not CLASS_NAME.fullmatch(value):
            raise SearchError(
                gettext(
                    "REDACT is set, so “error:” finds only the class of an error, such as "
                    "error:HTTPError."
                )
            )
        return _with(search, _has_class(value), has_error=True)
    start = Lower(Substr("last_error", 1, ERROR_LENGTH))
    has_text = GreaterThan(StrIndex(start, Value(value.lower())), 0)
    return _with(search, has_text, has_error=True)


def _has_class(name: str) -> Q:
    """Return the condition that the error's class is this, or ends with a dot and this.

    The class ends before the first colon or line break. Add a dot before it and a line break
    after it, so that they need not be searched for separately.
    """
    text = Concat(Value("."), Lower(Substr("last_error", 1, ERROR_LENGTH)), Value("\n"))
    colon, line_end = StrIndex(text, Value(":")), StrIndex(text, Value("\n"))

    def ends_at(mark: str, place: StrIndex) -> Q:
        found = StrIndex(text, Value(f".{name.lower()}{mark}"))
        return Q(GreaterThan(found, 0)) & Q(Exact(found + Value(len(name) + 1), place))

    before_colon = Q(Exact(colon, 0)) | Q(GreaterThan(colon, line_end))
    return Q(last_error__isnull=False) & (
        ends_at(":", colon) | (ends_at("\n", line_end) & before_colon)
    )


def _header(search: Search, value: str) -> Search:
    name, sign, text = value.partition("=")
    if not (name and sign and text):
        raise SearchError(
            gettext("“header:%s” is not possible: write a name, = and the whole value.") % value
        )
    _require_visible(name)
    pair = (encode_headers({name: text}, most=10**6) or "")[1:-1]
    return _with(search, GreaterThan(StrIndex(F("headers"), Value(pair)), 0))


def _trace(search: Search, value: str) -> Search:
    if not TRACE_ID.fullmatch(value):
        raise SearchError(
            gettext("“%s” is not a trace id: it has 32 digits 0 to 9 and a to f.") % value
        )
    _require_visible("traceparent")
    start = f'"traceparent":"00-{value}-'
    return _with(search, GreaterThan(StrIndex(F("headers"), Value(start)), 0))


def _require_visible(header: str) -> None:
    if redaction.is_hidden((header,)):
        raise SearchError(gettext("REDACT hides the header “%s”, so no search finds it.") % header)


WORDS: Final = {
    "id": Word(_event_id, "id:01KAW3J5"),
    "unique": Word(_column("unique_key"), "unique:invoice-17"),
    "key": Word(_column("key"), "key:order-17"),
    "aggregate": Word(_aggregate, "aggregate:shop.Order:17"),
    "tenant": Word(_column("tenant_id"), "tenant:acme"),
    "type": Word(_type, "type:order.*"),
    "queue": Word(_queue, "queue:mail"),
    "state": Word(_state, "state:dead"),
    "error": Word(_error, "error:HTTPError"),
    "trace": Word(_trace, "trace:0af7651916cd43dd8448eb211c80319c"),
    "header": Word(_header, 'header:"log.request=r-7"'),
}
