"""Reshard a state into another layout: plan the exchange, move pieces, verify checksums."""
