"""Paths and URLs, environment, JSON from outside, streams, the cache."""
