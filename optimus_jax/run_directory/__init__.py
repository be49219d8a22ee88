"""What a run leaves: its files, their lock, logs, and what its data are known by."""
