"""What runs inside an SGLang engine process: our sampler and weight digests."""
