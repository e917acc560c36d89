"""The Flower project whose rounds are timed: the same task with and without CollaPipe."""
