"""Text to batches: formats, tokenizers, packing, held-out split, loader."""
