"""Generate text from a trained model."""
