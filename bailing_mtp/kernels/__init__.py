"""Kernels: Triton on the GPU, and in `reference` a plain torch twin of each, same name and signature."""
