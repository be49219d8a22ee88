"""Generate text from a trained model; write down recordings."""
