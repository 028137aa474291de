"""Samples of the guides that have SQL of their own for PostgreSQL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection, transaction

import django_outbox as outbox
from tests import samples

pytestmark = pytest.mark.django_db


def test_138_141_the_samples_of_serve_tenants(settings: Any) -> None:
    with samples.modules("how-to/integrations.md#Tenants") as shop:
        settings.OUTBOX = vars(shop["settings"])["OUTBOX"]
        tenancy = shop["shop.tenancy"]
        seen: list[Any] = []

        def listener(event: outbox.Event) -> None:
            seen.append((tenancy.current_tenant.get(), event.tenant_id))

        outbox.listener("order.placed")(listener)
        token = tenancy.current_tenant.set("north")
        with transaction.atomic():
            outbox.write("order.placed", {})
        tenancy.current_tenant.reset(token)
        assert outbox.drain() == 1
        samples.registry.remove(listener)
        assert seen == [("north", "north")]
        assert tenancy.current_tenant.get() is None
        receive = shop["shop.incoming"].receive
        ids = {receive(tenant, {"id": 1}) for tenant in ("north", "south", "north")}
        assert len(ids) == 2
        if connection.vendor == "postgresql":
            with (
                shop["shop.row_security"].as_tenant(SimpleNamespace(tenant_id="south")),
                connection.cursor() as cursor,
            ):
                cursor.execute("SELECT current_setting('shop.tenant')")
                assert cursor.fetchone() == ("south",)
