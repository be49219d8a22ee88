"""The planner: hardware profiles, cost model, learning, search, ahead-of-time compilation,
trials.
"""
