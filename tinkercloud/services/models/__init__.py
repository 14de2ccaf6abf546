"""Models and samplers: creation, training, sampling."""
