"""Federated training of a vision transformer in plain torch."""
