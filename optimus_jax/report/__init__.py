"""HTML pages: a run, runs side by side, plans.

`run_report` and `compared_runs` assemble the pages about runs: `run_history` reads a run directory,
`run_events` parses events, `run_charts` draws, and `run_decisions`, `run_settings` and
`run_profiles` make sections. `plan_page` is about plans. `page` turns blocks into HTML;
`formatting` formats numbers.
"""
