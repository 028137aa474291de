"""Tests with django-oscar and Wagtail, in an environment of their own: ``tox -e apps``."""
