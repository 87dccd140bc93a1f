"""Softmax attention as latent attention: rotated keys that heads share, and one latent of what is left."""
