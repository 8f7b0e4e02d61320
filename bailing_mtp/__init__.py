"""bailing_mtp: Megatron-style training and speculative rollout of Bailing / Ling-3.0 models with their MTP layer."""
