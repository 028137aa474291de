"""The demonstration of the shop: ``python -m example_project.demo`` runs and checks it."""
