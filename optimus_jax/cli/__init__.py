"""The commands of `optimus`, one module each: `optimus train`, `optimus plan` and others."""
