"""The Bailing V3 model over megatron-core: KDA, gated MLA, experts, the MTP layer, and the trunk."""
