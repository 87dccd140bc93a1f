"""The search for the best design inside a trained model: `heddle convert --search`."""
