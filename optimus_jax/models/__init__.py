"""Decoders that name logical axes; kernels; Hugging Face's weights; FLOPs."""
