"""System checks of listeners: queues that are configured, and interceptors of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.checks import CheckMessage, Error, Warning, register

from .. import conf, hooks
from ..conf import Settings
from ..exceptions import did_you_mean
from ..listeners import registry
from ..queue_settings import DEFAULT_QUEUE
from .databases import Configs


@register("django_outbox")
def check_queues(app_configs: Configs, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report E015 a queue that is not configured; W016 one without listeners; W017 one stream."""
    if conf.problems() or (settings := conf.current()).MODE == "writer_only":  # W006 reports it
        return
    yield from (*_unknown(settings), *_unused(settings), *_pointless(settings))


def _unknown(settings: Settings) -> Iterator[CheckMessage]:
    known = [*settings.queues]
    for each in registry.listeners():
        if each.queue not in known:
            yield Error(
                f"{each.where} listens to {each.event_type!r} in the queue {each.queue!r}, which "
                f'OUTBOX["QUEUES"] does not have; expected one of {", ".join(known)}.',
                hint=did_you_mean(each.queue, known, "Correct queue= of the listener.")
                + f' Or add it: OUTBOX["QUEUES"] = {{{each.queue!r}: {{}}}}.',
                id="django_outbox.E015",
            )


def _unused(settings: Settings) -> Iterator[CheckMessage]:
    used = {DEFAULT_QUEUE, *(each.queue for each in registry.listeners())}
    unused = [each for each in settings.queues if each not in used]
    if unused:
        yield Warning(
            f'No listener has one of these queues of OUTBOX["QUEUES"]: {", ".join(unused)}. '
            "Workers start threads for them all the same.",
            hint="Give a listener queue=, or remove the queue.",
            id="django_outbox.W016",
        )


def _pointless(settings: Settings) -> Iterator[CheckMessage]:
    if settings.MODE == "ordered" and settings.ORDERING == "global" and len(settings.queues) > 1:
        what = (
            "a slow queue, or a relay whose broker is away," if settings.RELAYS else "a slow queue"
        )
        yield Warning(
            f'OUTBOX["ORDERING"] is "global": all events are one stream, so {what} holds up every '
            "other queue.",
            hint='Set OUTBOX["ORDERING"] = "aggregate", or leave queues and relays out.',
            id="django_outbox.W017",
        )


@register("django_outbox")
def check_batch_interceptors(app_configs: Configs, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report W018 interceptors without ``batch = True``, if there are batch listeners."""
    if conf.problems() or conf.current().MODE == "writer_only":
        return
    # A relay runs nothing of the project that would need an interceptor.
    bulk = [each for each in registry.listeners() if each.batching and each.check is None]
    try:
        interceptors = hooks.interceptors()
    except Exception:  # noqa: BLE001 - E002 reports whatever importing one raises
        return
    pairs = zip(conf.current().INTERCEPTORS, interceptors, strict=True)
    left_out = [path for path, each in pairs if not getattr(each, "batch", False)]
    if bulk and left_out:
        yield Warning(
            f'OUTBOX["INTERCEPTORS"] has {", ".join(left_out)}, which batch listeners such as '
            f"{bulk[0].where} are called without; expected the attribute batch = True.",
            hint="Have each take a list of events, too, and set batch = True on it; or silence "
            "this if batches need none of what it does.",
            id="django_outbox.W018",
        )
