"""Checkpoints on disk and snapshots in memory: saving, restoring, retries, room on the disk."""
