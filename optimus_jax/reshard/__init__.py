"""Moves a state into another layout: plans the exchange, moves pieces, verifies checksums."""
