"""Figures that anyone can re-run: measured in turn with a reference, and given as ratios to it."""
