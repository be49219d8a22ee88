"""What the operating system gives: paths and URLs, environment variables, JSON from outside, streams, the cache."""
