"""From responses to training batches: rewards, advantages, samples."""
