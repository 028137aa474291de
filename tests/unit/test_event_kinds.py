"""Which classes may be declared: each kind that does not come back equal is refused, no other."""

import dataclasses
import enum
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import cached_property
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    Optional,
    TypeVar,
    Union,
)
from uuid import UUID

import msgspec
import pytest
from django.db import models

from django_outbox import InvalidEvent, PayloadError, event
from django_outbox.events import decode, encode, fit
from django_outbox.events.pydantic_kinds import KINDS
from django_outbox.events.typed import difference

TYPES = {"Annotated": Annotated, "date": date}
LIBRARIES = ("dataclass", "attrs", "msgspec", "pydantic")
T = TypeVar("T")
Cents = NewType("Cents", int)


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 1


class Size(models.TextChoices):
    LARGE = "large"


class Rights(enum.IntFlag):
    READ = 1
    WRITE = 2


class Mixed(enum.Enum):
    TEXT = "a"
    NUMBER = 1


class Pairs(enum.Enum):
    FIRST = (1, 2)


class Sku(str):
    __slots__ = ()


@dataclass
class Line:
    sku: str
    price: Decimal = Decimal("1.10")


@dataclass
class Other:
    sku: str
    price: Decimal = Decimal("1.10")


class Pair(NamedTuple):
    number: int
    id: UUID


@dataclass
class Page(Generic[T]):
    of: list[T]


class Card(msgspec.Struct, tag=True):
    number: str


class Cash(msgspec.Struct, tag=True):
    number: str


class Plain:
    """A class of no kind that is known, and without equality."""

    def __init__(self, number: int = 0) -> None:
        self.number = number


ID = UUID(int=7)
NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)
ALL = {*LIBRARIES}
BY_MSGSPEC = {"dataclass", "attrs", "msgspec"}

# An annotation, a value, and the libraries with which a field of it is refused.
FIELDS: dict[str, tuple[Any, Any, set[str]]] = {
    "bool": (bool, True, set()),
    "int": (int, 2**70, set()),
    "float": (float, 0.1, set()),
    "str": (str, "null", set()),
    "Any": (Any, {"a": [1, None]}, set()),
    "object": (object, [1], set()),
    "Decimal": (Decimal, Decimal("1.10"), set()),
    "UUID": (UUID, ID, set()),
    "datetime": (datetime, NOON, set()),
    "naive datetime": (datetime, NOON.replace(tzinfo=None), set()),
    "date": (date, date(2030, 1, 2), set()),
    "time": (time, time(1, 2, 3, 4), set()),
    "timedelta": (timedelta, timedelta(days=-3, microseconds=7), set()),
    "new type": (Cents, 5, set()),
    "marked": (Annotated[int, "cents"], 5, set()),
    "literal": (Literal["a", 1], 1, set()),
    "literal or None": (Optional[Literal["a"]], None, set()),  # noqa: UP045
    "literal or str": (Literal["a"] | str, "b", set()),  # noqa: PYI051
    "enum": (Colour, Colour.RED, set()),
    "int enum": (Level, Level.HIGH, set()),
    "Django's choices": (Size, Size.LARGE, set()),
    "flag": (Rights, Rights.READ | Rights.WRITE, set()),
    "enum of str and int": (Mixed, Mixed.NUMBER, BY_MSGSPEC),
    "enum of tuples": (Pairs, Pairs.FIRST, ALL),
    "literal of an enum": (Literal[Colour.RED], Colour.RED, ALL),
    "list": (list[UUID], [ID], set()),
    "Iterable": (Iterable[int], [1], {"pydantic"}),
    "Iterator": (Iterator[int], [1], ALL),
    "Sequence": (Sequence[UUID], [ID], set()),
    "tuple": (tuple[int, UUID], (1, ID), set()),
    "tuple of any length": (tuple[UUID, ...], (ID, ID), set()),
    "named tuple": (Pair, Pair(1, ID), set()),
    "set": (set[int], {1, 2}, {"dataclass"}),
    "frozenset": (frozenset[UUID], frozenset({ID}), {"dataclass"}),
    "bytes": (bytes, b"a", BY_MSGSPEC),
    "bytes or None": (bytes | None, b"a", BY_MSGSPEC),
    "dict": (dict[str, UUID], {"a": ID}, set()),
    "Mapping": (Mapping[str, UUID], {"a": ID}, set()),
    "int keys": (dict[int, str], {1: "a"}, set()),
    "enum keys": (dict[Size, int], {Size.LARGE: 1}, set()),
    "literal keys": (dict[Literal["a", "b"], int], {"a": 1}, set()),
    "int literal keys": (dict[Literal[1, 2], str], {1: "a"}, {"pydantic"}),
    "UUID keys": (dict[UUID, int], {ID: 1}, {"dataclass"}),
    "date keys": (dict[date, int], {date(2030, 1, 2): 1}, {"dataclass"}),
    "keys of plain enums": (dict[Colour, int], {Colour.RED: 1}, {"dataclass"}),
    "bool keys": (dict[bool, int], {True: 1}, set()),
    "Decimal keys": (dict[Decimal, int], {Decimal("1.5"): 1}, BY_MSGSPEC),
    "tuple keys": (dict[tuple[int, int], int], {(1, 2): 3}, ALL),
    "int and str keys": (dict[int | str, int], {1: 2}, ALL),
    "keys or None": (dict[int | None, int], {None: 2}, ALL),
    "mixed literal keys": (dict[Literal["1", 1], int], {1: 2}, ALL),
    "a key of keys": (list[dict[int | str, int]], [{1: 2}], ALL),
    "int or None": (int | None, None, set()),
    "old union": (Union[UUID, None], ID, set()),  # noqa: UP007
    "int or str": (int | str, "5", set()),
    "int or float": (int | float, 1.0, set()),
    "Decimal or int": (Decimal | int, Decimal(5), set()),
    "list or str": (list[str] | str, "a", set()),
    "str or UUID": (str | UUID, str(ID), ALL),
    "date or datetime": (date | datetime, NOON, ALL),
    "str or enum": (str | Colour, Colour.RED, ALL),
    "list or tuple": (list[int] | tuple[int, ...], (1,), ALL),
    "dict or class": (dict[str, Any] | Line, Line("a"), ALL),
    "class or class": (Line | Other, Other("a"), ALL),
    "in a list: class or class": (list[Line | Other], [Other("a")], ALL),
    "class": (Line, Line("a", Decimal("2.50")), set()),
    "class or None": (Line | None, Line("a"), set()),
    "dict of lists of classes": (dict[str, list[Line]], {"a": [Line("b")]}, set()),
    "generic of a type": (Page[UUID], Page([ID]), set()),
    "generic": (Page, Page([ID]), ALL),
    "Struct": (Card, Card("4"), {"pydantic"}),
    "tagged Structs": (Card | Cash | None, Cash("4"), {"pydantic"}),
    "Raw": (msgspec.Raw, msgspec.Raw(b"1"), ALL),
    "str subclass": (Sku, Sku("a"), ALL),
    "pattern": (re.Pattern, re.compile("a", re.IGNORECASE), ALL),
    "complex": (complex, 1j, BY_MSGSPEC),
    "unknown class": (Plain, Plain(), ALL),
}


def made(library: str, annotation: Any) -> Any:
    """Return a class of a library with one field, ``value``."""
    if library == "dataclass":
        return dataclasses.make_dataclass("Made", [("value", annotation)])
    if library == "msgspec":
        return msgspec.defstruct("Made", [("value", annotation)])
    if library == "attrs":
        attrs = pytest.importorskip("attrs")
        return attrs.make_class("Made", {"value": attrs.field(type=annotation)})
    pydantic = pytest.importorskip("pydantic")
    options = pydantic.ConfigDict(arbitrary_types_allowed=True)
    return pydantic.create_model("Made", __config__=options, value=(annotation, ...))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_refused_or_comes_back_equal(library: str, name: str) -> None:
    annotation, value, refused = FIELDS[name]
    cls = made(library, annotation)
    if library in refused:
        with pytest.raises(InvalidEvent, match=r"Made\.value"):
            event("made")(cls)
        return
    payload = event("made")(cls)(value=value)
    read = decode(encode(payload), cls)
    assert read == payload
    assert type(read.value) is type(value)
    assert difference(payload, read) is None


# --- classes that are refused, by what is wrong with them -----------------------------------------


def private_attrs() -> Any:
    attrs = pytest.importorskip("attrs")

    @attrs.define
    class Made:
        _total: int = 0

    return Made


def nested_private_attrs() -> Any:
    return dataclasses.make_dataclass("Outer", [("inner", private_attrs())])


def init_var() -> Any:
    @dataclass
    class Made:
        total: int
        rate: InitVar[int] = 1

    return Made


def nested_init_var() -> Any:
    return dataclasses.make_dataclass("Outer", [("total", list[init_var()])])  # type: ignore[misc]


def model(title: str = "Made", config: Mapping[str, Any] | None = None, **fields: Any) -> Any:
    pydantic = pytest.importorskip("pydantic")
    return pydantic.create_model(title, __config__=config, **fields)


def of_pydantic(name: str, *arguments: Any, **options: Any) -> Any:
    return getattr(pytest.importorskip("pydantic"), name)(*arguments, **options)


def aliased(config: Mapping[str, Any] | None = None, **names: Any) -> Any:
    return model(config=config, total=(int, of_pydantic("Field", **names)))


def of_dataclass(**names: Any) -> Any:
    """Return a model with a dataclass of pydantic's."""
    pydantic = pytest.importorskip("pydantic.dataclasses")
    inner = dataclasses.make_dataclass("In", [("total", int, of_pydantic("Field", 0, **names))])
    return model("Outer", of=(pydantic.dataclass(inner), ...))


def defined(body: str, **names: Any) -> Any:
    """Return the model ``Made`` with these lines."""
    pydantic = pytest.importorskip("pydantic")
    given = {name: getattr(pydantic, name) for name in pydantic.__all__ if name in body}
    lines = "\n".join(f"    {line}" for line in body.split("; "))
    given["BaseModel"] = pydantic.BaseModel
    exec(f"class Made(BaseModel):\n{lines}", names := {**TYPES, **given, **names})
    return names["Made"]


def secret() -> Any:
    return pytest.importorskip("pydantic").SecretStr


def parsed() -> Any:
    return pytest.importorskip("pydantic").Json


def root(of: Any) -> Any:
    return pytest.importorskip("pydantic").RootModel[of]


def excluded() -> Any:
    return model(total=(int, of_pydantic("Field", 0, exclude=True)))


COMPUTED = "total = computed_field(return_type=int)(property(lambda self: 7))"
BY_FUNCTION = (
    "of: Annotated[Annotated[A, Tag('a')] | Annotated[B, Tag('b')], Discriminator(lambda of: 'a')]"
)

# The kind, a class of it, and the field that the error names.
REFUSED: dict[str, tuple[str, Callable[[], Any], str]] = {
    "attrs: private": ("private", private_attrs, "Made._total"),
    "a private name inside": ("private", nested_private_attrs, "Made._total"),
    "InitVar": ("unreadable", init_var, "Made.rate"),
    "InitVar inside": ("unreadable", nested_init_var, "Outer.total"),
    "InitVar inside a model": ("init", lambda: model("Outer", of=(init_var(), ...)), "Made.rate"),
    "not of init, inside a model": ("init", lambda: model(of=(Derived, ...)), "Derived.total"),
    "generic": ("generic", lambda: Page, "Page"),
    "unknown class": ("foreign", lambda: made("attrs", list[Plain]), "Made.value"),
    "a dataclass that is a dict": (
        "builtin",
        lambda: dataclasses.make_dataclass("Made", [("n", int, 0)], bases=(dict,)),
        "Made",
    ),
    "not a dataclass yet": ("bare", lambda: Plain, "Plain"),
    "bytes": ("bytes", lambda: made("msgspec", bytes), "Made.value"),
    "Raw": ("raw", lambda: made("msgspec", msgspec.Raw), "Made.value"),
    "set": ("set", lambda: made("dataclass", set[int]), "Made.value"),
    "set in a class in a list": (
        "set",
        lambda: made("dataclass", list[made("dataclass", set[int])]),
        "Made.value",
    ),
    "keys": ("keys", lambda: made("attrs", dict[int | str, int]), "Made.value"),
    "secret": ("secret", lambda: model(token=(secret(), ...)), "Made.token"),
    "secret in a list": ("secret", lambda: model(token=(list[secret()], ...)), "Made.token"),  # type: ignore[misc]
    "secret as the root": ("secret", lambda: root(secret()), "root"),
    "secret in a model in a dataclass": (
        "secret",
        lambda: made("dataclass", model("In", token=(secret(), ...)) | None),
        "In.token",
    ),
    "excluded": ("excluded", excluded, "Made.total"),
    "validation alias": ("alias", lambda: aliased(validation_alias="sum"), "Made.total"),
    "serialization alias": ("alias", lambda: aliased(serialization_alias="sum"), "Made.total"),
    "alias path": (
        "alias",
        lambda: aliased(validation_alias=of_pydantic("AliasPath", "n", 0)),
        "Made.total",
    ),
    "computed, extra forbidden": (
        "computed",
        lambda: defined(f"model_config = {{'extra': 'forbid'}}; {COMPUTED}"),
        "Made.total",
    ),
    "computed, extra kept": (
        "computed",
        lambda: defined(f"model_config = {{'extra': 'allow'}}; {COMPUTED}"),
        "Made.total",
    ),
    "computed, named as a field": (
        "computed",
        lambda: defined(f"sum: int = Field(alias='total'); {COMPUTED}"),
        "Made.total",
    ),
    "excluded at times": (
        "excluded",
        lambda: model(total=(int, of_pydantic("Field", 0, exclude_if=bool))),
        "Made.total",
    ),
    "excluded inside": ("excluded", lambda: of_dataclass(exclude=True), "In.total"),
    "alias inside": ("alias", lambda: of_dataclass(serialization_alias="sum"), "In.total"),
    "field serializer": (
        "serializer",
        lambda: defined("total: int; twice = field_serializer('total')(lambda self, n: n * 2)"),
        "Made.total",
    ),
    "model serializer": (
        "serializer",
        lambda: defined("total: int; one = model_serializer(lambda self: 1)"),
        "Made",
    ),
    "serializer": (
        "serializer",
        lambda: defined("total: Annotated[int, PlainSerializer(str)]"),
        "Made.total",
    ),
    "encoders": ("config", lambda: model(config={"json_encoders": {int: str}}), "json_encoders"),
    "bytes in base64": ("config", lambda: model(config={"ser_json_bytes": "base64"}), "Made"),
    "seconds": ("config", lambda: model(config={"ser_json_temporal": "seconds"}), "Made"),
    "literal": ("values", lambda: made("pydantic", Literal[b"a"]), "Made.value"),
    "not validated": ("alien", lambda: defined("day: SkipValidation[date]"), "Made.day"),
    "told apart by a function": (
        "union",
        lambda: defined(BY_FUNCTION, A=model("A", n=(int, 0)), B=model("B", n=(int, 0))),
        "Made.of",
    ),
    "one after the other": (
        "union",
        lambda: model(of=(int | str, of_pydantic("Field", union_mode="left_to_right"))),
        "Made.of",
    ),
    "private attribute": ("private", lambda: model(_total=(int, 0)), "Made._total"),
    "Json": ("json", lambda: model(of=(parsed()[list[int]], ...)), "Made.of"),
    "models alike": (
        "union",
        lambda: model(of=(model("A", n=(int, 0)) | model("B", n=(int, 0)), 1)),
        "Made.of",
    ),
    "enum of tuples": ("values", lambda: model(of=(Pairs, ...)), "Made.of"),
    "Struct in a model": ("alien", lambda: made("pydantic", Card), "Made.value"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_of_a_kind_that_does_not_come_back_is_refused(name: str) -> None:
    kind, make, where = REFUSED[name]
    with pytest.raises(InvalidEvent) as raised:
        event("made")(make())
    assert where in str(raised.value)
    assert KINDS[kind] in str(raised.value)


def test_every_kind_is_tested() -> None:
    assert {kind for kind, _, _ in REFUSED.values()} == set(KINDS)


# --- classes that are taken, and come back --------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Base:
    total: int
    UNIT: ClassVar[str] = "cents"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited(Base):
    lines: list[Line] = field(default_factory=list, metadata={"note": "kept"})
    note: str = field(default="", compare=False)
    _hidden: int = 0

    @property
    def double(self) -> int:
        return self.total * 2


@dataclass
class Derived:
    net: int
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.net * 2

    @cached_property
    def half(self) -> float:
        return self.net / 2


@dataclass(eq=False)
class Unequal:
    of: list[Line]


@dataclass
class PageOfIds(Page[UUID]):
    number: int = 1


@dataclass
class Tree:
    name: str
    left: Optional["Tree"] = None
    leaves: "list[Tree]" = field(default_factory=list)


class Renamed(
    msgspec.Struct, rename="camel", omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    order_id: int
    unit_price: int | msgspec.UnsetType = msgspec.UNSET
    _note: str = ""


class AsList(msgspec.Struct, array_like=True, tag="list"):
    of: Card | Cash


def of_attrs() -> Any:
    attrs = pytest.importorskip("attrs")

    @attrs.define(kw_only=True)
    class Made:
        of: list[int] = attrs.field(converter=lambda text: [*map(int, text.split(","))])
        total: int = attrs.field(alias="sum", validator=attrs.validators.gt(3))
        more: set[str] = attrs.field(factory=set)
        later: int = attrs.field(init=False, default=1)

    payload = Made(of="5,6", sum=7, more={"a"})
    payload.later = 9
    return payload


def tagged() -> Any:
    cat = model("Cat", kind=(Literal["cat"], "cat"), name=(str, ...))
    dog = model("Dog", kind=(Literal["dog"], "dog"), name=(str, ...))
    union = Annotated[cat | dog, of_pydantic("Field", discriminator="kind")]
    made = model(one=(union, ...), many=(list[union], ...))  # type: ignore[valid-type]
    return made(one=dog(name="a"), many=[cat(name="b"), dog(name="c")])


def with_extra() -> Any:
    return model(config={"extra": "allow"}, n=(int, ...))(n=1, more=["x"])


COMES_BACK: dict[str, Callable[[], Any]] = {
    "frozen, slots, inherited": lambda: Inherited(total=1, lines=[Line("a")], note="n", _hidden=5),
    "not of init": lambda: Derived(3),
    "without equality": lambda: Unequal([Line("a")]),
    "generic of a type": lambda: PageOfIds([ID], 2),
    "recursive": lambda: Tree("a", Tree("b"), [Tree("c")]),
    "named tuple": lambda: Pair(1, ID),
    "Struct": lambda: Renamed(order_id=5, _note="x"),
    "Struct as a list": lambda: AsList(Cash("1")),
    "attrs": of_attrs,
    "model in a dataclass": lambda: made("dataclass", list[(m := model(n=(int, 0)))])([m(n=3)]),
    "model in a Struct": lambda: made("msgspec", (m := model(n=(int, 0))) | None)(m(n=3)),
    "dataclass in a model": lambda: model(of=(Tree, ...))(of=Tree("a", Tree("b"))),
    "alias": lambda: aliased(alias="sum")(sum=3),
    "alias or name": lambda: aliased({"populate_by_name": True}, validation_alias="sum")(sum=3),
    "choice of aliases": lambda: aliased(
        validation_alias=of_pydantic("AliasChoices", "sum", "total")
    )(sum=3),
    "alias generator": lambda: model(config={"alias_generator": str.upper}, n=(int, ...))(N=1),
    "computed": lambda: defined(f"net: int; {COMPUTED}")(net=1),
    "root": lambda: root(list[UUID])([ID]),
    "discriminator": tagged,
    "extra": with_extra,
}


@pytest.mark.parametrize("name", COMES_BACK)
def test_what_is_taken_comes_back(name: str) -> None:
    payload = COMES_BACK[name]()
    event("made")(type(payload))
    read = decode(encode(payload), type(payload))
    assert difference(payload, read) is None
    assert encode(read) == encode(payload)


def test_a_class_that_is_defined_later_is_looked_for_later() -> None:
    """Neither refused nor accepted at its declaration: the module may go on."""
    for cls in (dataclasses.make_dataclass("Made", [("of", "NotYet")]), model(of=("NotYet", ...))):
        assert event("made")(cls) is cls
        with pytest.raises(PayloadError, match=r"Made(\.of)?: .*NotYet|NotYet|not defined"):
            fit({"of": 1}, cls)


# A serializer of the project's own may read what the default one cannot.
def test_with_an_own_serializer_every_class_is_taken(settings: Any) -> None:
    settings.OUTBOX = {"SERIALIZER": "tests.test_serializer.Sets"}
    assert event("made")(Plain) is Plain


# --- differences ----------------------------------------------------------------------------------


DIFFERENCES: dict[str, tuple[Any, Any, str]] = {
    "a field": (Line("a"), Line("b"), "sku"),
    "a field inside": (Tree("a", Tree("b")), Tree("a", Tree("c")), "left.name"),
    "an item": (Page([1, 2]), Page([1, 3]), "of[1]"),
    "a missing item": (Page([1, 2]), Page([1]), "of"),
    "a value by key": (Page([{"k": 1}]), Page([{"k": 2}]), "of[0].k"),
    "a key": (Page([{1: 1}]), Page([{"1": 1}]), "of[0]"),
    "a tuple": (Page([(1,)]), Page([[1]]), "of[0]"),
    "an equal subclass": (Page([Line("a")]), Page([Other("a")]), "of[0]"),
    "what equality ignores": (Inherited(total=1, note="a"), Inherited(total=1, note="b"), "note"),
    "without equality": (Unequal([Line("a")]), Unequal([Line("b")]), "of[0].sku"),
    "an unknown class": (Plain(1), Plain(2), "number"),
    "a Struct": (Renamed(order_id=1), Renamed(order_id=2), "order_id"),
    "the root": ([1], {"a": 1}, "the payload"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_names_the_field(name: str) -> None:
    written, read, where = DIFFERENCES[name]
    assert (difference(written, read) or "").split(" (")[0] == where
    assert difference(written, written) is None


def test_equal_values_of_other_types_are_no_difference() -> None:
    assert difference(Page([1, Size.LARGE]), Page([1.0, "large"])) is None
    assert difference([Plain(1)], [Plain(1)]) is None


def test_what_raises_while_it_is_written_is_invalid() -> None:
    """An attribute that was never set, and one that raises whatever it likes."""
    cls = dataclasses.make_dataclass("Made", [("later", int, field(init=False))])
    with pytest.raises(InvalidEvent, match="payload cannot be written"):
        encode(event("made")(cls)())
    with pytest.raises(InvalidEvent, match=r"payload\.of\[0\]"):
        encode({"of": [model(total=("Nowhere", ...)).model_construct(total=1)]})


def test_other_libraries_are_not_imported() -> None:
    code = (
        "import sys, dataclasses, django_outbox as outbox\n"
        "cls = dataclasses.make_dataclass('Made', [('n', int), ('of', list[float])])\n"
        "outbox.event('made')(cls)\n"
        "assert not {'pydantic', 'attrs', 'attr'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
