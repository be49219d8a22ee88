"""Axes, rules and shardings; the collectives that a step is made of; ZeRO. Knows nothing of plans."""
