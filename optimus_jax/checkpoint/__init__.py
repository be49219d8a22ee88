"""Checkpoints on disk, snapshots in memory, retries, room on the disk."""
