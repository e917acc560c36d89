"""Rounds of a deployment, phase by phase, beside those of plain Flower."""
