"""System check for batch listeners: interceptors that are not entered for them."""

from __future__ import annotations

from typing import Any

from django.core.checks import CheckMessage, Warning, register

from .. import conf, hooks
from ..listeners import registry
from .databases import Configs


@register("django_outbox")
def check_batch_interceptors(app_configs: Configs, **kwargs: Any) -> list[CheckMessage]:
    """Report W018 interceptors without ``batch = True``, if there are batch listeners."""
    if conf.problems() or conf.current().MODE == "writer_only":
        return []
    # A relay runs nothing of the project that would need an interceptor.
    bulk = [each for each in registry.listeners() if each.batching and each.check is None]
    try:
        interceptors = hooks.interceptors()
    except Exception:  # noqa: BLE001 - E002 reports whatever importing one raises
        return []
    paths = conf.current().INTERCEPTORS
    left_out = [
        path
        for path, each in zip(paths, interceptors, strict=True)
        if not getattr(each, "batch", False)
    ]
    if not bulk or not left_out:
        return []
    return [
        Warning(
            f'OUTBOX["INTERCEPTORS"] has {", ".join(left_out)}, which batch listeners such as '
            f"{bulk[0].where} are called without; expected the attribute batch = True.",
            hint="Have each take a list of events, too, and set batch = True on it; or silence "
            "this if batches need none of what it does.",
            id="django_outbox.W018",
        )
    ]
