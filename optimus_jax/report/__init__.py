"""The HTML report of a run.

`run_report` assembles the page. `run_history` reads the run directory, `run_events` parses events,
`run_decisions` writes the sections about decisions, `run_charts` draws the charts; `components`,
`page` and `svg` turn them into HTML, and `formatting` formats numbers.
"""
