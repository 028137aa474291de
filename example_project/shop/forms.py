"""The order form: a name, and one number for each product."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from django import forms
from django.forms import BoundField

from .models import Product


class OrderForm(forms.Form):
    customer = forms.CharField(
        label="Your name", max_length=80, widget=forms.TextInput(attrs={"autocomplete": "name"})
    )

    def __init__(self, *args: Any, products: Iterable[Product], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.products = list(products)
        for product in self.products:
            # No upper limit: only the transaction knows what is left when the order comes.
            self.fields[product.sku] = forms.IntegerField(
                label="Quantity", min_value=0, max_value=99, required=False, initial=0
            )

    def clean(self) -> None:
        super().clean()
        if not self.errors and not self.quantities():
            raise forms.ValidationError("Choose at least one thing.")

    def quantities(self) -> dict[Product, int]:
        chosen = {product: self.cleaned_data.get(product.sku) for product in self.products}
        return {product: quantity for product, quantity in chosen.items() if quantity}

    def shelf(self) -> Iterator[tuple[Product, BoundField]]:
        """Yield each product with its field, for the template."""
        for product in self.products:
            yield product, self[product.sku]
