"""What a plan costs: time by operator and collective, memory by device."""
