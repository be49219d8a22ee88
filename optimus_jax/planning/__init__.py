"""Profiles, costs, learning, search, ahead-of-time compiling, trials."""
