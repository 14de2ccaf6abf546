"""Sampling on SGLang engines: their start, routing, admission and weight updates."""
