"""A plain Flower project on generated data."""
