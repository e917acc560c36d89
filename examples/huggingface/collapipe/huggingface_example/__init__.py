"""Federated fine-tuning of a Hugging Face text classifier."""
