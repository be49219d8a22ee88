"""A state into another layout: exchange, programs, host copies, checksums."""
