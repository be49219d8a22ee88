"""A few real steps under the best candidates before a run."""
