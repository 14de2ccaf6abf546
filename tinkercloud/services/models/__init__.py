"""Models and samplers: creation, training, sampling, and the results that clients poll."""
