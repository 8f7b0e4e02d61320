"""Training losses over hidden states, always in token chunks, always as sums with their own counts."""
