"""Text, images and sound to batches: formats, tokenizers, packing, split, loader."""
