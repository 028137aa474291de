"""What the simulated services store: every call, and the goods that the courier refuses."""

from __future__ import annotations

from django.db import models
from django.utils import timezone


class PartnerError(Exception):
    """The service answered, and refused."""


class Call(models.Model):
    """One call as the service saw it, accepted or not."""

    partner = models.CharField(max_length=20)
    idempotency_key = models.CharField(max_length=36, db_index=True)
    served = models.BooleanField()
    answer = models.CharField(max_length=120)
    at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["pk"]

    def __str__(self) -> str:
        return f"{self.partner}: {self.answer}"

    @classmethod
    def note(cls, partner: str, key: str, answer: str, *, served: bool) -> str:
        cls.objects.create(partner=partner, idempotency_key=key, answer=answer, served=served)
        return answer


class RefusedGoods(models.Model):
    """Goods that the courier does not carry; delete a row, and it carries them."""

    sku = models.SlugField(unique=True)
    reason = models.CharField(max_length=80)

    class Meta:
        verbose_name_plural = "refused goods"

    def __str__(self) -> str:
        return f"{self.sku} ({self.reason})"
