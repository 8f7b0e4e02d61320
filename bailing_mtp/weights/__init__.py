"""Hugging Face checkpoints in and out: the name table, streamed loading of any shard, and export."""
