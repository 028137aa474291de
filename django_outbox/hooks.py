"""Objects that settings name by path: serializer, retry policy, interceptors, hooks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from . import events
from .conf import current, imported, until_changed
from .events import Event, fit, read_only_headers
from .exceptions import InvalidEvent, PayloadError
from .listeners import retry
from .listeners.callables import qualified_name as name_of

logger = logging.getLogger("django_outbox")


class JSON:
    """The default serializer, to JSON text; other serializers may build on it.

    Example::

        text = JSON.dumps({"order": 7})
        assert JSON.loads(text, dict[str, int]) == {"order": 7}
    """

    dumps = staticmethod(events.encode)
    loads = staticmethod(events.decode)


class CustomSerializer:
    """Wraps ``SERIALIZER``: every error becomes ``InvalidEvent`` or ``PayloadError``."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self._accepts_type = _accepts(wrapped.loads, 2)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a reference: the process that unpickles an event uses its own serializer."""
        return serializer, ()

    def __deepcopy__(self, memo: Any) -> CustomSerializer:
        return self

    def dumps(self, payload: Any) -> Any:
        """Return the payload as text; raise ``InvalidEvent`` if that fails."""
        try:
            return self._wrapped.dumps(payload)
        except InvalidEvent:
            raise
        except Exception as error:
            raise InvalidEvent(
                f"{name_of(self._wrapped.dumps)} cannot write the payload, "
                f"{type(payload).__name__}: {error!r}"
            ) from error

    def loads(self, text: str, type_: Any = None) -> Any:
        """Decode text, to an instance of ``type_`` if given; raise ``PayloadError`` on failure."""
        try:
            if type_ is not None and self._accepts_type:
                return self._wrapped.loads(text, type_)
            value = self._wrapped.loads(text)
        except PayloadError:
            raise
        except Exception as error:
            raise PayloadError(
                f"{name_of(self._wrapped.loads)} cannot read it: {error!r}"
            ) from error
        return value if type_ is None else fit(value, type_)


def _accepts(call: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(call).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


@until_changed
def serializer() -> Any:
    """Return the object with ``dumps`` and ``loads`` that ``SERIALIZER`` names."""
    value = current().SERIALIZER
    if value is None:
        return JSON
    if isinstance(value, str):
        value = imported('OUTBOX["SERIALIZER"]', value)
    if isinstance(value, type) and _accepts(value, 0):
        value = value()
    if not callable(getattr(value, "dumps", None)) or not callable(getattr(value, "loads", None)):
        raise ImproperlyConfigured(
            f'OUTBOX["SERIALIZER"] is {value!r}; expected an object with dumps and loads.'
        )
    return CustomSerializer(value)


@until_changed
def retry_policy() -> retry.RetryPolicy:
    """Return the retry policy of listeners without one of their own."""
    value = current().RETRY
    return retry.Exponential() if value is None else retry_from(value, 'OUTBOX["RETRY"]')


def retry_from(value: Any, where: str) -> retry.RetryPolicy:
    """Return a policy given as an object, a dotted path or a dict; ``where`` is for the error."""
    try:
        return retry.from_setting(value)
    except (ImportError, TypeError, ValueError) as error:
        raise ImproperlyConfigured(f"{where}: {error}") from error


@until_changed
def interceptors() -> tuple[Callable[[Event], Any], ...]:
    """Return the callables that create a context manager for each call of a listener."""
    return _callables(
        "INTERCEPTORS", "a callable that takes an event and returns a context manager"
    )


def _callables(name: str, expected: str) -> tuple[Any, ...]:
    """Return what the paths of a setting name, which are functions."""
    found = _imported(name)
    for path, each in found.items():
        if not callable(each) or inspect.iscoroutinefunction(each):
            raise ImproperlyConfigured(
                f'OUTBOX["{name}"] names {path!r}, which is {each!r}; expected {expected}.'
            )
    return (*found.values(),)


def _imported(name: str) -> dict[str, Any]:
    return {path: imported(f'OUTBOX["{name}"]', path) for path in getattr(current(), name)}


@until_changed
def batch_interceptors() -> tuple[Callable[[Any], Any], ...]:
    """Return the interceptors marked ``batch = True``, which take the events of a whole call."""
    return tuple(each for each in interceptors() if getattr(each, "batch", False))


HOOK_METHODS = ("before_write", "after_write", "after_commit", "after_rollback")


class WriterHooks:
    """The hooks in ``WRITER_HOOKS``, called in the order of the setting."""

    def __init__(self, hooks: Sequence[object]) -> None:
        self._methods = {
            method: [getattr(hook, method) for hook in hooks if hasattr(hook, method)]
            for method in HOOK_METHODS
        }

    def run_before_write(self, given: list[Event]) -> list[Event]:
        """Return the events that ``before_write`` returns; none means: suppress the write.

        Raises what a hook raises, and ``InvalidEvent`` if it returns anything but events.
        """
        for before_write in self._methods["before_write"]:
            if given:
                given = _events(before_write(given), before_write)
        return given

    def run(self, method: str, events: list[Event]) -> None:
        """Call one method of every hook, after the INSERT; log what they raise."""
        for hook in self._methods[method]:
            try:
                hook([*events])
            except Exception:
                logger.exception("writer hook failed hook=%s", name_of(hook))


def _events(answer: Any, hook: Callable[..., Any]) -> list[Event]:
    changed = [*answer] if isinstance(answer, Iterable) else []
    wrong = [
        f"{type(each).__name__} among its events" for each in changed if type(each) is not Event
    ]
    if answer is not None and not isinstance(answer, Iterable):
        wrong = [type(answer).__name__]
    if wrong:
        raise InvalidEvent(
            f"{name_of(hook)} returned {wrong[0]}; expected a list of Events, or None to suppress "
            "them."
        )
    return changed


@until_changed
def writer_hooks() -> WriterHooks | None:
    """Return the hooks in ``WRITER_HOOKS``; None if there are none."""
    hooks = [_hook(path, cls) for path, cls in _imported("WRITER_HOOKS").items()]
    return WriterHooks(hooks) if hooks else None


def _hook(path: str, cls: Any) -> object:
    setting = f'OUTBOX["WRITER_HOOKS"] names {path!r}, '
    if not isinstance(cls, type):
        raise ImproperlyConfigured(f"{setting}which is {cls!r}; expected a class.")
    defined = {name: getattr(cls, name) for name in HOOK_METHODS if hasattr(cls, name)}
    if not defined:
        raise ImproperlyConfigured(
            f"{setting}which has none of the methods {', '.join(HOOK_METHODS)}; "
            "expected one at least."
        )
    for name, method in defined.items():
        if not callable(method) or inspect.iscoroutinefunction(method):
            raise ImproperlyConfigured(f"{setting}whose {name} is not an ordinary method.")
    try:
        return cls()
    except TypeError as error:
        raise ImproperlyConfigured(
            f"{setting}which cannot be made without arguments: {error}"
        ) from error


@until_changed
def context_providers() -> tuple[Callable[[], Mapping[str, str] | None], ...]:
    """Return the callables that ``CONTEXT_PROVIDERS`` names."""
    return _callables("CONTEXT_PROVIDERS", "an ordinary function that returns a dict of str to str")


def context() -> dict[str, str]:
    """Collect headers from the context providers; later ones win, failures are logged."""
    merged: dict[str, str] = {}
    for provider in context_providers():
        try:
            merged.update(read_only_headers(provider()))
        except Exception:
            logger.exception("context provider failed; skipped provider=%s", name_of(provider))
    return merged
