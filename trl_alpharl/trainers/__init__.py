"""Trainers on transformers' training loop."""
