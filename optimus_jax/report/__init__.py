"""The page about a run.

`run_report` makes it: `run_story` reads the run's lines, `run_events` and `run_decisions` say what
was decided, `run_figures` draws, `page` and `svg` make HTML of it.
"""
