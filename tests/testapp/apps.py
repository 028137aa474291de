"""The tiny shop of the tests."""

from django.apps import AppConfig


class ShopConfig(AppConfig):
    name = "tests.testapp"
    label = "testapp"
