"""Where the time of measured steps goes: profiles, by the terms of the planner."""
