"""One file per family: `FAMILY`, with functions between the two configs and a map of the weights."""
