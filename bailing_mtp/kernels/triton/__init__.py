"""Kernels of the rollout's decode step in Triton; `decode` names them as `kernels.reference.decode` does."""
