"""A stand-in with the names, signatures and arithmetic that are used of transformer-engine 2.8, on the CPU in torch.

It notes what is constructed and called, and computes in the dtype it is given, inside an FP8 scope too.
"""

from transformer_engine import common, pytorch

__version__ = "2.8.0"
__all__ = ["common", "pytorch"]
