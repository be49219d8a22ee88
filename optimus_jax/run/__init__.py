"""One run put together: Python API, flags, first plan and state, inputs, display."""
