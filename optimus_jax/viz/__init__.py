"""Pictures for notebooks: layouts, schedules and plans.

Needs the extra `plots` or `notebooks`.

`layouts`: which device holds which part of which tensor; `timelines`: what the stages of a pipeline
do when; `frontier`: the planner's plans by time and memory.
"""
