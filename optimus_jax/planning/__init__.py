"""Which plan is best: profiles, costs, learning from measurements, search, ahead-of-time compiling, trials."""
