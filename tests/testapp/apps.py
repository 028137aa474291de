"""The tiny shop of the tests."""

from django.apps import AppConfig

from tests import crashpoints


class ShopConfig(AppConfig):
    name = "tests.testapp"
    label = "testapp"

    def ready(self) -> None:
        crashpoints.install()  # does nothing but in a worker process that a test lets die
