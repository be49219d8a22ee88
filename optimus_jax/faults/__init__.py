"""What goes wrong in a run: watchdog, heartbeats, stop requests, divergence, the fault log."""
