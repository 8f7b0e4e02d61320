class QuantizedTensor:
    """megatron-core asks of each parameter whether it is one."""
