"""Pictures of layouts, schedules and plans, for notebooks. Needs the extra `notebooks`; nothing else in the package imports it.

`layouts` which device holds which part of which tensor · `timelines` what the stages of a pipeline do when ·
`frontier` the planner's plans by time and memory.
"""
