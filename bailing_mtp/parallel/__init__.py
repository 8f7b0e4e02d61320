"""Process groups as values, the CPU device set-up, and vocab-parallel maths."""
