"""What the imitated services remember: every call, and what the courier refuses to carry."""

from __future__ import annotations

from django.db import models
from django.utils import timezone


class PartnerError(Exception):
    """The other side answered, and the answer was no."""


class Call(models.Model):
    """One call as the other side saw it, whether it was served or not."""

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
    """The courier's list; delete a line and parcels with these goods go through."""

    sku = models.SlugField(unique=True)
    reason = models.CharField(max_length=80)

    class Meta:
        verbose_name_plural = "refused goods"

    def __str__(self) -> str:
        return f"{self.sku} ({self.reason})"
