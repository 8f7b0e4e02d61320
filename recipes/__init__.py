"""The verbs: python -m recipes.<verb> [overrides]. Only they know hydra, wandb and the environment."""
