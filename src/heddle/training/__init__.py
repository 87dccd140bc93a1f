"""Training: one readable loop, exact resume, and steps that are not taken when a number is not finite."""
