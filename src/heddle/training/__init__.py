"""Training: one loop, bit-equal resume, and skipping of steps with a non-finite loss or gradient."""
