"""Federated instruction tuning of a language model with LoRA adapters."""
