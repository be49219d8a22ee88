"""Learning from measured steps: rates and corrections for predictions."""
