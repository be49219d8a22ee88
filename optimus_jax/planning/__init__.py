"""The planner: hardware profiles, cost model, learning, search, compiling ahead."""
