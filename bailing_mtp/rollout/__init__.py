"""Exact speculative generation on the trainer's own weights."""
