"""The planner: profiles, costs, learning, search, ahead-of-time compilation, trials."""
