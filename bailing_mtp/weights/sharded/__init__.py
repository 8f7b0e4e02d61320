"""This package's own checkpoints: written by all ranks at once, read by any number of them in any layout."""
