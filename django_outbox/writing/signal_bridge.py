"""``OutboxSignal``: a Django signal whose ``send`` also writes an event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asgiref.sync import sync_to_async
from django.dispatch import Signal

from ..conf import current
from ..events import GLOBAL, Declaration, Event
from ..events.typed import Path, check_path, resolve_path
from ..exceptions import InvalidEvent
from .write import write


class OutboxSignal(Signal):
    """A ``django.dispatch.Signal`` that writes its arguments as an event, then calls its receivers.

    ``key``, ``aggregate_id`` and the values of ``headers`` and ``payload`` are paths or callables.
    A path begins with the name of an argument (``"order.id"``); a callable gets the dict of
    arguments. Without ``payload`` the arguments are the payload. ``using`` is the database alias.
    ``use_caching`` is Django's own argument.

    With ``OUTBOX["SIGNAL_BRIDGE"] = False`` the receivers are called and nothing is written.

    Raises ``InvalidEvent`` for values that no event can have. Every send method raises what
    ``write`` raises, before any receiver is called.

    Example::

        order_shipped = outbox.OutboxSignal("order.shipped", key="order")

        with transaction.atomic():
            order_shipped.send(sender=None, order=7)
    """

    def __init__(
        self,
        event_type: Any,
        *,
        key: Path | None = None,
        headers: Mapping[str, Path] | None = None,
        aggregate_type: Any = GLOBAL,
        aggregate_id: Path | None = None,
        payload: Mapping[str, Path] | Callable[[dict[str, Any]], Any] | None = None,
        using: str | None = None,
        use_caching: bool = False,
    ) -> None:
        super().__init__(use_caching)
        self._declaration = Declaration(
            event_type=event_type,
            key=key,
            headers=headers or {},
            aggregate_type=aggregate_type,
            aggregate_id=aggregate_id,
        )
        if isinstance(payload, Mapping):
            for name, path in payload.items():
                check_path(f"payload[{name!r}]", path)
        elif payload is not None and not callable(payload):
            raise InvalidEvent(f"payload is {payload!r}; expected a dict of paths or a callable.")
        self._payload = payload
        self._using = using

    def send(self, sender: Any, **named: Any) -> list[tuple[Any, Any]]:
        """Write the event and call the receivers; an error in a receiver propagates."""
        self._write(named)
        return super().send(sender, **named)

    def send_robust(self, sender: Any, **named: Any) -> list[tuple[Any, Any]]:
        """Write the event and call the receivers; their errors are returned."""
        self._write(named)
        return super().send_robust(sender, **named)

    async def asend(self, sender: Any, **named: Any) -> list[tuple[Any, Any]]:
        """Do what ``send`` does; like ``awrite``, write in Django's thread-sensitive thread."""
        await sync_to_async(self._write)(named)
        return await super().asend(sender, **named)

    async def asend_robust(self, sender: Any, **named: Any) -> list[tuple[Any, Any]]:
        """Do what ``send_robust`` does; write in Django's thread-sensitive thread."""
        await sync_to_async(self._write)(named)
        return await super().asend_robust(sender, **named)

    def _write(self, named: dict[str, Any]) -> None:
        if current().SIGNAL_BRIDGE:
            fields = self._declaration.fields(named)
            write(Event(payload=self._payload_of(named), **fields), using=self._using)

    def _payload_of(self, named: dict[str, Any]) -> Any:
        if isinstance(self._payload, Mapping):
            return {
                name: resolve_path(f"payload[{name!r}]", path, named)
                for name, path in self._payload.items()
            }
        return named if self._payload is None else self._payload(named)
