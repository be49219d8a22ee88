"""Parts of a decision: candidates, prices, conditions and the learnt costs of switches."""
