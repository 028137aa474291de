"""Listeners that worker processes of the test suite find by autodiscovery."""
