"""Routes the shop and the outbox to a second database, if ``SHOP_DATABASE_URL`` names one."""

from __future__ import annotations

from typing import Any


class ShopRouter:
    """The shop and the outbox share a database, because they share transactions.

    The warehouse and the partners hear of orders by events only, so they may be elsewhere.
    """

    alias = "shop"
    apps = frozenset({"shop", "django_outbox"})

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return self.alias if model._meta.app_label in self.apps else None

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        # "shop" has the shop and the outbox, "default" has everything else.
        return (db == self.alias) == (app_label in self.apps)
