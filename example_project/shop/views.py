"""The two pages of the shop: place an order, and follow the orders."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_safe

from .forms import OrderForm
from .models import Order, Product
from .ordering import OutOfStock, place
from .tracking import follow

SHOWN = 20  # orders on the page


@require_http_methods(["GET", "HEAD", "POST"])
def shop(request: HttpRequest) -> HttpResponse:
    form = OrderForm(request.POST or None, products=Product.objects.all())
    if form.is_valid():
        try:
            order = place(form.cleaned_data["customer"], form.quantities())
        except OutOfStock as error:
            form.add_error(error.product.sku, str(error))
        else:
            return redirect(f"{reverse('orders')}#order-{order.pk}")
    return render(request, "shop/shop.html", {"form": form}, status=422 if form.errors else 200)


@require_safe
def orders(request: HttpRequest) -> HttpResponse:
    latest = Order.objects.prefetch_related("lines__product")[:SHOWN]
    followed = follow(latest)
    settled = all(step.is_settled for each in followed for step in each.steps)
    return render(request, "shop/orders.html", {"orders": followed, "settled": settled})
