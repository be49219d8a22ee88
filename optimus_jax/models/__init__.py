"""Decoders in Flax that name logical axes; attention kernels; weights from Hugging Face; FLOPs and bytes of a layer."""
