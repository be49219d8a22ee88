"""Text to tokens to batches: sources, formats, tokenizers, packing, held-out split, sampler, loader."""
