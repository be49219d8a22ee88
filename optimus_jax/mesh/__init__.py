"""Axes, rules, shardings, a step's collectives and ZeRO. No module here imports a Plan."""
