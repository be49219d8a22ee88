"""The commands, a module each: `optimus train`, `optimus plan` and the others."""
