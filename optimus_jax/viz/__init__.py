"""Pictures for notebooks: layouts, schedules and plans.

Needs the extra `plots` or `notebooks`.

`layouts`: which device holds which shard of which tensor; `timelines`: pipeline schedules over
time; `frontier`: plans by step time and memory.
"""
