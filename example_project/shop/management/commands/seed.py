"""``manage.py seed``: create the products, and the login admin / admin for a local machine."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand

from example_project.partners.models import RefusedGoods
from example_project.shop.models import Product

PRODUCTS = {
    "green-tea": ("Green tea", "Sencha from the spring harvest, 100 g.", 1290, 60),
    "teapot": ("Teapot", "Stoneware with a strainer, 0.8 l.", 4800, 24),
    "cups": ("Pair of cups", "Thrown by hand; no two alike.", 2650, 40),
    "spirit-burner": ("Spirit burner", "Keeps the pot warm. The courier refuses it.", 3400, 12),
}
REFUSED = {"spirit-burner": "flammable"}


class Command(BaseCommand):
    help = "Fill the shelves; with DEBUG also create the superuser admin / admin."

    def handle(self, *args: Any, **options: Any) -> None:
        for sku, (name, description, price_cents, stock) in PRODUCTS.items():
            Product.objects.update_or_create(
                sku=sku,
                defaults={
                    "name": name,
                    "description": description,
                    "price_cents": price_cents,
                    "stock": stock,
                },
            )
        for sku, reason in REFUSED.items():
            RefusedGoods.objects.update_or_create(sku=sku, defaults={"reason": reason})
        self.stdout.write(f"{len(PRODUCTS)} products on the shelves.")
        self.make_login()

    def make_login(self) -> None:
        users = get_user_model()._default_manager
        if not settings.DEBUG:
            self.stdout.write("No login made: a password known to all is for DEBUG only.")
        elif not users.filter(username="admin").exists():
            users.create_superuser("admin", "admin@example.com", "admin")
            self.stdout.write("Login for /admin/: admin, password admin.")
