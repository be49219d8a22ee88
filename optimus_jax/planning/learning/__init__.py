"""Learn from measured steps: fit rates, and correct predictions."""
