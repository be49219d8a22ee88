"""Checkpoints on disk, snapshots in memory, retries of failed saves, checks of disk space."""
