"""Watchdog, heartbeats, stop requests, divergence, the fault log."""
