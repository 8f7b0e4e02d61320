"""Plain torch twins of the GPU kernels: their specification, and what runs on a CPU."""
