"""Predict what training costs on many GPUs: memory, communication, speed."""
