"""Parts of a decision: candidates, prices, conditions, what was learnt from switches."""
