"""Models with logical axes, attention kernels, Hugging Face weights and FLOP counts."""
