"""Edit products; view orders and payments."""

from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest

from .models import Order, OrderLine, Payment, Product


class OrderLineInline(admin.TabularInline):
    model = OrderLine
    extra = 0


@admin.register(Product)
class ProductAdmin(admin.ModelAdmin):
    list_display = ["name", "price", "stock"]
    list_editable = ["stock"]


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ["pk", "customer", "placed_at", "total"]
    inlines = [OrderLineInline]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False  # placing an order is more than a row: it takes stock and writes events

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False


@admin.register(Payment)
class PaymentAdmin(admin.ModelAdmin):
    list_display = ["order", "receipt", "paid_at"]
