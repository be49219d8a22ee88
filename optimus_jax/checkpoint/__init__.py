"""Checkpoints on disk, snapshots in memory, retries of failed saves, and checks of disk space."""
