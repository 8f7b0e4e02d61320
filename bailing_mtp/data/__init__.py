"""Text to packed token batches: tokenizer, document sources, token shards, packing, loader."""
