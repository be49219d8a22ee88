"""From what is asked to ranked plans: legal layouts, their order, and words about both."""
