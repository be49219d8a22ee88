"""Plans compiled for GPUs that are not here, and what their programs say."""
