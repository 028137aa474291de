"""Every block of Python on every page runs; what a page does not show is a stand-in."""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.machinery
import re
import sys
from base64 import b64encode
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
from django.db import models, transaction
from django.dispatch import Signal
from django.test import override_settings
from django.test.utils import isolate_apps

from django_outbox import conf, signals
from django_outbox.exceptions import ListenerAlreadyRegistered
from django_outbox.listeners import registry
from tests import samples
from tests.testapp.models import Order

NOT_EVERYWHERE = ("django.tasks", "django.tasks.backends", "django_prometheus")
GIVEN = {
    "models": models,
    "payload": {"order": 1},
    "trace_id": "t",
    "text": '{"a":1}',
    "monday_at_eight": datetime(2030, 1, 7, 8, tzinfo=timezone.utc),
    "transfer_id": 17,
    "picture": b"PNG",
}


class Named(type):
    """The type of stand-ins for classes; an attribute that they lack is a stand-in, too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith(("_", "model_")):  # as of pydantic
            raise AttributeError(name)
        return MagicMock(name=name)


def stand_in(name: str) -> Any:
    if name == "Order":
        order = MagicMock(name=name)
        order.objects.create.side_effect = lambda **_: Order.objects.create(sku="teapot")
        return order
    if not re.match("[A-Z][a-z]", name):
        return MagicMock(name=name)
    if name.endswith(("Error", "Exception", "Timeout")):
        return Named(name, (Exception,), {})
    parts = {"__init__": lambda *_, **__: None, "__getattr__": MagicMock()}
    return dataclass(init=False)(Named(name, (), parts))  # so that it can be an event


class Given(dict[str, Any]):
    """Names of a block; one that the page does not define is a stand-in."""

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or hasattr(builtins, name):
            raise KeyError(name)
        return self.setdefault(name, stand_in(name))


class Block(ModuleType):
    """The module that a block of a page makes."""


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a stand-in for a module that is not here: the reader's own, or not installed."""

    def __init__(self, page: str) -> None:
        self._names = {
            each.module if isinstance(each, ast.ImportFrom) else alias.name
            for code in samples.blocks(page).values()
            for each in ast.walk(ast.parse(code))
            if isinstance(each, ast.ImportFrom | ast.Import)
            for alias in each.names
        }

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] == "django":
            return None
        if not any(f"{each}.".startswith(f"{name}.") for each in self._names):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module, names = ModuleType(spec.name), Given()

        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return names[name]

        vars(module).update(__getattr__=attribute, __path__=[])
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave it as it is."""


@contextmanager
def surroundings(page: str) -> Iterator[None]:
    """Forget afterwards what blocks import, register, connect and configure."""
    listeners = {*registry.listeners()}
    receivers = {
        each: [*each.receivers] for each in vars(signals).values() if isinstance(each, Signal)
    }
    with ExitStack() as stack:
        stack.callback(forget_modules, {*sys.modules})
        stack.enter_context(patch.object(sys, "meta_path", [*sys.meta_path, Absent(page)]))
        for alias in ("default", "other"):
            stack.enter_context(transaction.atomic(alias))
        stack.enter_context(isolate_apps("tests.testapp"))
        # A worker of a sample waits no longer for the locks of the transactions around it.
        given = {"OUTBOX_KEYS": [b64encode(bytes(32))], "OUTBOX": {"LOCK_WAIT": 0.01}}
        stack.enter_context(override_settings(**given))
        replaced = {
            "django_outbox.contrib.prometheus": MagicMock(serve=lambda port: (port, None)),
            "django_tasks_db.models": MagicMock(),  # of an app that is not installed here
        }
        context = stack.enter_context(pytest.MonkeyPatch.context())
        for name, stub in replaced.items():
            context.setitem(sys.modules, name, stub)
        try:
            yield
        finally:
            for signal, kept in receivers.items():
                signal.receivers = kept
                signal.sender_receivers_cache.clear()
            forget_listeners(listeners)


def forget_modules(kept: Collection[str]) -> None:
    """Forget stand-ins and the modules of pages.

    What is installed stays imported, with or without a spec: cryptography cannot come twice.
    """
    for name in {*sys.modules} - {*kept}:
        loader = getattr(getattr(sys.modules[name], "__spec__", None), "loader", None)
        if isinstance(sys.modules[name], Block) or isinstance(loader, Absent):
            del sys.modules[name]


def forget_listeners(kept: Collection[Any] = ()) -> None:
    for each in {*registry.listeners()} - {*kept}:
        if not each.call.__module__.startswith("django_outbox."):
            registry.remove(each.call)


@pytest.mark.django_db(databases=["default", "other"])
@pytest.mark.parametrize("page", [each for each in samples.pages() if "tutorial/" not in each])
def test_every_block_of_a_page_runs(page: str) -> None:
    """In order; blocks of one file share their names, and another version of it replaces them."""
    with surroundings(page):
        modules: dict[str, Given] = {}
        for title, code in samples.blocks(page).items():
            path, version = title.partition(".py")[0], title.partition(" (")[2]
            name = path.replace("/", ".") if ".py" in title else "sample"
            if version:
                forget_listeners()
            names = Given() if version else modules.setdefault(name, Given(GIVEN))
            names |= {"__name__": name, "__package__": name.rpartition(".")[0]}
            if "models.Model" in code:
                names["__name__"] = "tests.testapp.samples"
            if samples.is_of_settings(title, code):
                names |= {"BASE_DIR": Path("/srv/shop"), "INSTALLED_APPS": [], "MIDDLEWARE": []}
            sys.modules[names["__name__"]] = module = Block(name)
            block = compile(code, f"{page}: {title}", "exec")
            try:
                exec(block, names)
            except ListenerAlreadyRegistered:  # another section has the same listener
                forget_listeners()
                exec(block, names)
            except ModuleNotFoundError as error:
                if error.name not in NOT_EVERYWHERE:
                    raise
                pytest.skip(f"this Python or Django has no {error.name}")
            vars(module).update(names)
            with override_settings(OUTBOX=names.get("OUTBOX", {})):
                assert conf.problems() == []
            for entry in names.get("DATABASES", {}).values():
                assert find_spec(entry["ENGINE"])  # its driver need not be installed
