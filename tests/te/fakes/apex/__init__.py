"""A stand-in for what is used of NVIDIA apex, on the CPU in torch."""
