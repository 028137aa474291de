"""Two pages of the shop, and the admin."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from example_project.shop import views

admin.site.site_header = "Tea shop: the office"
admin.site.site_title = "Tea shop"

urlpatterns = [
    path("", views.shop, name="shop"),
    path("orders/", views.orders, name="orders"),
    path("admin/", admin.site.urls),
]
