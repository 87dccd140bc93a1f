"""What every head of a model looks at on a text, as numbers and as one page."""
