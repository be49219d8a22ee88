"""The controller: observe, decide, prepare, switch, verify, go back."""
