"""Axes, rules, shardings; a step's collectives; ZeRO. Knows nothing of plans."""
