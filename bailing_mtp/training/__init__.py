"""Training: state, objective, the one step that all recipes share, schedule, metrics."""
