"""What a run leaves: its files, their lock, logs, and fingerprints of its data."""
