"""The registry of listeners: routes, duplicates, signatures, autodiscovery."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import run_checks
from django.db import models
from django.test import modify_settings, override_settings

from django_outbox import ANY, GLOBAL, Event, Fixed, ListenerAlreadyRegistered, event, listener
from django_outbox.events import typed
from django_outbox.listeners import callables, registry
from tests.cases import cases


class Kind(models.TextChoices):
    PLACED = "order.placed", "placed"


class Colour(Enum):
    RED = 1


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test a registry of its own."""
    monkeypatch.setattr(registry, "_listeners", {})
    monkeypatch.setattr(registry, "conflicts", [])
    registry.route.cache_clear()
    yield
    registry.route.cache_clear()


def named(name: str) -> Callable[[Event], None]:
    def listen(event: Event) -> None: ...

    listen.__qualname__ = name
    return listen


def add(what: Any, called: str, **options: Any) -> None:
    listener(what, **options)(named(called))


def route(aggregate_type: str, event_type: str) -> list[str]:
    found = registry.route(aggregate_type, event_type)
    return [each.call.__qualname__ for each in found]


# --- routes -----------------------------------------------------------------------------------


def test_a_listener_hears_every_aggregate_type_or_one() -> None:
    assert registry.route("a", "b") == ()
    add("x", "any")
    add("y", "order", aggregate_type="shop.Order")
    add("z", "global", aggregate_type=GLOBAL)
    assert route("shop.Order", "x") == route(GLOBAL, "x") == ["any"]
    assert (route("shop.Order", "y"), route(GLOBAL, "y")) == (["order"], [])
    assert (route("shop.Order", "z"), route(GLOBAL, "z")) == ([], ["global"])


def test_the_most_specific_unnamed_listener_is_called_alone() -> None:
    """The order is: exact pair, any aggregate type, then patterns by their literal text."""
    order = [
        ("exact pair", "order.placed", "shop.Order"),
        ("exact type", "order.placed", ANY),
        ("longer pattern of the pair", "order.pl*", "shop.Order"),
        ("longer pattern", "order.pl*", ANY),
        ("pattern of the pair", "order.*", "shop.Order"),
        ("pattern", "order.*", ANY),
        ("everything of the pair", "*", "shop.Order"),
        ("everything", "*", ANY),
    ]
    for called, event_type, aggregate_type in reversed(order):
        add(event_type, called, aggregate_type=aggregate_type)

    for called, *_ in order:
        assert route("shop.Order", "order.placed") == [called]
        registry._listeners.popitem()  # the one added last
        registry.route.cache_clear()
    assert route("shop.Order", "order.placed") == []


def test_every_named_listener_that_matches_gets_the_event_too() -> None:
    """Fan-out is explicit: only a name lets more than one listener receive an event."""
    add("*", "audit", name="audit")
    add("x", "exact")
    add("x", "mail", name="mail")
    add("x*", "pattern, unnamed")
    add("x", "order mail", name="mail", aggregate_type="shop.Order")
    add("y", "other", name="other")

    assert route("shop.Order", "x") == ["order mail", "exact", "mail", "audit"]
    assert route(GLOBAL, "x") == ["exact", "mail", "audit"]
    assert route(GLOBAL, "z") == ["audit"]


@cases(
    ("pattern", "matching", "others"),
    [  # a dot matches only a dot
        ("order.*", "order.placed order.line.added order.", "order xorder.placed orderXplaced"),
        ("*.placed", "order.placed", "order.placed.late"),
        ("o*r.*d", "order.placed", ""),
        ("*", "any\\nthing", ""),
        ("[ab]?", "[ab]?", "a1"),
        ("[ab]?*", "[ab]?1", "a1"),
    ],
)
def test_only_the_star_is_special(pattern: str, matching: str, others: str) -> None:
    registry._listeners.clear()
    add(pattern, "it")
    assert [each for each in matching.split() if not route(GLOBAL, each)] == []
    assert [each for each in others.split() if route(GLOBAL, each)] == []


def test_a_listener_added_after_a_look_is_found_and_one_removed_is_gone() -> None:
    call = named("it")
    for _ in range(2):
        assert route(GLOBAL, "x") == []
        listener("x")(call)
        listener("y")(call)
        assert route(GLOBAL, "x") == ["it"]
        registry.remove(call)
    assert registry.listeners() == ()


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (Kind.PLACED, Kind.PLACED),
        (Kind.PLACED, "order.placed"),
        ("order.placed", Kind.PLACED),
        (Colour.RED, Colour.RED),
        (Colour.RED, "RED"),
    ],
)
def test_enum_members_and_their_text_are_one(said: Any, heard: Any) -> None:
    add(heard, "it", aggregate_type=heard)
    event = Event(event_type=said, aggregate_type=said)
    assert route(event.aggregate_type, event.event_type) == ["it"]


# --- registration -------------------------------------------------------------------------------


def test_a_second_listener_of_a_pair_is_refused_and_both_are_named() -> None:
    @listener("x")
    def first(event: Event) -> None: ...

    def second(event: Event) -> None: ...

    with pytest.raises(ListenerAlreadyRegistered) as caught:
        listener("x")(second)
    message = str(caught.value)
    for each in (first, second):
        line = inspect.getsourcelines(each)[1]
        assert f"{__name__}.{each.__qualname__} ({__file__}:{line})" in message
    assert "name=" in message
    assert route(GLOBAL, "x") == [first.__qualname__]


@cases(
    ("file", "second", "replaces"),
    [
        ("<console>", "\n", True),  # another input of a shell
        ("<string>", "", True),
        ("shop/listeners.py", "", True),  # a reload
        ("shop/listeners.py", "\n", False),  # another function of this name
    ],
)
def test_a_function_that_is_defined_again_replaces_the_first(
    file: str, second: str, replaces: bool
) -> None:
    registry._listeners.clear()
    names: dict[str, Any] = {"listener": listener, "__name__": "shop.listeners"}
    source = 'if True:\n @listener("x")\n def it(event): ...\n\n @it.fallback\n def no(*given): ...'
    exec(compile(source, file, "exec"), names)
    first = names["it"]
    with nullcontext() if replaces else pytest.raises(ListenerAlreadyRegistered, match="'x'"):
        exec(compile(second + source, file, "exec"), names)
    assert [each.call is not first for each in registry.listeners()] == [replaces]


@pytest.mark.parametrize("value", ["", "x" * 129, None, 5], ids=repr)
def test_a_type_that_no_event_can_have_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="event_type"):
        listener(value)
    with pytest.raises(ValueError, match="aggregate_type"):
        listener("x", aggregate_type=value)


@cases(
    ("option", "values", "said"),
    [
        ("retry", ["exponential", Fixed, 3], "retry policy"),
        ("timeout", [0, -1, "5"], "timeout"),
        ("name", [None], "name"),
        ("formerly", ["x mail", None, {"x mail"}, [5], [""], ["x" * 256], ["y", "x"]], "formerly"),
    ],
)
def test_options_that_would_fail_with_the_first_event_are_refused(
    option: str, values: list[Any], said: str
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=said):
            listener("x", **{option: value})(named("it"))


def test_a_title_that_does_not_fit_into_its_column_is_refused() -> None:
    longest = "n" * (255 - len("x "))
    listener("x", name=longest)(named("fits"))
    with pytest.raises(ValueError, match="characters"):
        listener("x", name=f"{longest}n")(named("does not fit"))
    assert route(GLOBAL, "x") == ["fits"]


def test_listeners_share_a_lane_if_they_share_their_name() -> None:
    """No name can be mistaken for another lane, or for lane and key."""
    names = ["", "mail", "?", "?a", "a:b", "n" * 64, "n" * 65, "n" * 66]
    lanes = [registry.lane_of(name) for name in names]
    assert lanes[:2] == ["", "mail"]
    assert len({*lanes}) == len(names)
    assert not [each for each in lanes if each.startswith(registry.UNROUTED_LANE)]
    assert not [each for each in lanes if ":" in each or len(each) > 64]


@cases(
    ("title", "formerly"), [("x", ["old"]), ("old", []), ("x", ["y mail"]), ("y a", ["z", "old"])]
)
def test_a_former_title_belongs_to_one_listener(title: str, formerly: list[str]) -> None:
    registry._listeners.clear()
    event_type, _, name = title.partition(" ")
    add("y", "first", name="mail", formerly=["older", "old"])
    with pytest.raises(ListenerAlreadyRegistered) as caught:
        add(event_type, "second", name=name, formerly=formerly)
    for each in ("first", "second"):
        assert f"{__name__}.{each} ({__file__}:" in str(caught.value)
    assert [each.title for each in registry.listeners()] == ["y mail"]


def test_a_renamed_listener_is_found_by_its_former_titles() -> None:
    add("x", "new", name="mail", formerly=("x letters", "y post"))
    for title in ("x mail", "x letters", "y post"):
        found = registry.by_title(title)
        assert found is not None
        assert found.title == "x mail"
        assert registry.titles_of(title) == ("x mail", "x letters", "y post")
    assert registry.by_title("letters") is None
    assert (registry.titles_of("letters"), registry.titles_of(None)) == (("letters",), ())
    assert {"mail", "letters", "post"} < {*registry.lanes()}


def test_the_types_of_a_class_share_the_former_titles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typed, "classes", {})
    placed = event("x", aliases=("old.x",))(dataclass(type("Placed", (), {})))
    add(placed, "it", name="mail", formerly=["x letters", "old.x letters"])
    assert [each.title for each in registry.listeners()] == ["x mail", "old.x mail"]
    assert {each.call.__qualname__ for each in registry.listeners()} == {"it"}
    with pytest.raises(ListenerAlreadyRegistered):
        add("y", "another", formerly=["old.x letters"])


# --- signatures ---------------------------------------------------------------------------------


class Object:
    def __call__(self, event: Event) -> None: ...

    def method(self, event: Event) -> None: ...

    @staticmethod
    def static(event: Event) -> None: ...

    @classmethod
    def of_class(cls, event: Event) -> None: ...


class AsyncObject:
    async def __call__(self, event: Event) -> None: ...


class Bare:
    def __call__(self) -> None: ...

    def method(self) -> None: ...


def function(event: Event) -> None: ...
async def coroutine(event: Event) -> None: ...
def optional(event: Event, more: int = 0) -> None: ...
def anything(*args: Any, **kwargs: Any) -> None: ...
def nothing() -> None: ...
def two(event: Event, other: Event) -> None: ...
def keyword(event: Event, *, other: int) -> None: ...
def by_name(*, event: Event) -> None: ...
async def async_two(event: Event, other: Event) -> None: ...


def generator(event: Event) -> Iterator[None]:
    yield


async def async_generator(event: Event) -> Any:
    yield


def decorated(call: Callable[[Event], None]) -> Callable[[Event], None]:
    @functools.wraps(call)
    def wrapper(event: Event) -> None:
        call(event)

    return wrapper


FIT: list[Any] = [
    *(function, coroutine, optional, anything, Object(), Object().method, Object.static),
    *(Object.of_class, AsyncObject(), functools.partial(two, None), decorated(function), print),
    lambda event: None,
]
UNFIT: list[Any] = [
    *(nothing, two, keyword, by_name, async_two, Bare(), Bare().method, Object.method),
    *(functools.partial(function, None), generator, async_generator),
    lambda: None,
]


def label(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__name__))


def errors(code: str) -> list[Any]:
    """Return the results of our own checks; those of models would query a MySQL server."""
    found = run_checks(tags=["django_outbox"])
    return [each for each in found if each.id == f"django_outbox.{code}"]


def faults() -> list[Any]:
    return errors("E010")


def test_what_takes_one_event_is_fit() -> None:
    for number, call in enumerate(FIT):
        listener("x", name=str(number))(call)
    assert faults() == []


@cases("call", UNFIT, ids=label)
def test_what_does_not_is_a_check_error_naming_it(call: Any) -> None:
    registry._listeners.clear()
    listener("x")(call)
    [error] = faults()
    assert callables.qualified_name(call) in error.msg
    assert error.hint == "Give it the signature (event)."
    assert error.is_serious()


@pytest.mark.parametrize(
    ("call", "is_async"),
    [
        (function, False),
        (coroutine, True),
        (Object(), False),
        (AsyncObject(), True),
        (functools.partial(async_two, None), True),
        (functools.partial(two, None), False),
    ],
    ids=label,
)
def test_async_listeners_are_told_apart(call: Any, is_async: bool) -> None:
    listener("x")(call)
    assert registry.listeners()[0].is_async is is_async


# --- autodiscovery --------------------------------------------------------------------------------


@pytest.fixture
def make_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Return a function that writes a package, which can be an installed app."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def make(name: str, listeners: str, *, module: str = "listeners") -> str:
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").touch()
        source = f"from django_outbox import listener\n{listeners}"
        (package / f"{module}.py").write_text(source)
        made.append(name)
        return name

    yield make
    for name in [each for each in sys.modules if each.partition(".")[0] in made]:
        del sys.modules[name]


LISTENS = '@listener("{}")\ndef it(event): ...\n'


def test_the_name_of_the_module_is_a_setting(make_app: Callable[..., str]) -> None:
    app = make_app("discovered_two", LISTENS.format("x"), module="reactions")
    with (
        override_settings(OUTBOX={"LISTENER_MODULE": "reactions"}),
        modify_settings(INSTALLED_APPS={"append": app}),
    ):
        assert route(GLOBAL, "x") == ["it"]


def test_a_conflict_between_apps_is_a_check_error_and_the_first_listens_on(
    make_app: Callable[..., str],
) -> None:
    apps = [
        make_app("conflict_one", LISTENS.format("x")),
        make_app("conflict_two", LISTENS.format("x")),
        make_app("conflict_three", LISTENS.format("y")),
    ]
    with modify_settings(INSTALLED_APPS={"append": apps}):
        [error] = errors("E011")
        assert "conflict_one.listeners.it" in error.msg
        assert "conflict_two.listeners.it" in error.msg
        assert error.hint == "Remove one of them, or give the second listener a name."
        assert registry.route(GLOBAL, "x")[0].call.__module__ == "conflict_one.listeners"
        assert route(GLOBAL, "y") == ["it"]


def test_a_listener_module_that_fails_is_not_hidden(make_app: Callable[..., str]) -> None:
    app = make_app("broken_one", "import nonsense_that_is_not_there\n")
    with (
        pytest.raises(ModuleNotFoundError, match="nonsense_that_is_not_there"),
        modify_settings(INSTALLED_APPS={"append": app}),
    ):
        pass
