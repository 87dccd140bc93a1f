"""Training: one loop, bit-equal resume, and steps that are skipped when a loss or gradient is not finite."""
