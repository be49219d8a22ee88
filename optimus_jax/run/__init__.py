"""One run put together: API, command line, first plan and state, inputs, display."""
