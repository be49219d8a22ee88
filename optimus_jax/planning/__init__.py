"""The planner: profiles, cost model, learning, search, ahead-of-time compilation and trials."""
