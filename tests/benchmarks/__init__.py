"""Figures that anyone can re-run: paired, in one process run, ratios against a reference."""
