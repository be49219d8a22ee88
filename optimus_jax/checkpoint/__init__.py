"""Checkpoints on disk, snapshots in memory, retries of failed saves, disk space."""
