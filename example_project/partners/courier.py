"""A courier that does not carry the goods on its list of refused goods."""

from __future__ import annotations

from collections.abc import Sequence

from .models import Call, PartnerError, RefusedGoods


def book(*, to: str, goods: Sequence[str], idempotency_key: str) -> str:
    """Return the tracking number; a repeated key gets the same one."""
    earlier = Call.objects.filter(partner="courier", idempotency_key=idempotency_key)
    if served := earlier.filter(served=True).first():
        return served.answer
    if refused := RefusedGoods.objects.filter(sku__in=goods).first():
        Call.note("courier", idempotency_key, f"refused: {refused}", served=False)
        raise PartnerError(f"The courier does not carry {refused} to {to}.")
    return Call.note("courier", idempotency_key, f"P-{idempotency_key[-8:]}", served=True)
