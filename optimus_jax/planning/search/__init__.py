"""Search for plans: enumerate legal layouts, rank them, and explain the result."""
