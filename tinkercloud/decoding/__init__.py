"""From logits to tokens, and where an answer stops: shared by every sampler."""
