"""Predict the cost of a plan: step time by operator and collective, and memory per device."""
