"""Pictures of layouts, schedules, plans and runs, for notebooks and for the page about a run. Needs the extra `plots` or `notebooks`; nothing else in the
package imports it.

`layouts` which device holds which part of which tensor · `timelines` what the stages of a pipeline do when ·
`frontier` the planner's plans by time and memory · `run_report` the page: `run_story` what a run's lines tell,
`run_events` and `run_decisions` its decisions, `run_figures` its pictures, `page` and `svg` how they become HTML.
"""
