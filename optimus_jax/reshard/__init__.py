"""Moves a state into another layout: the exchange, moves of pieces, checksums."""
