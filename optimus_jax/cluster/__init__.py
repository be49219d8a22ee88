"""Which processes make up a run: launchers, rendezvous, agreement."""
