"""Commands: `optimus train`, `optimus plan` and the others."""
