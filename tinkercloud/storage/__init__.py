"""SQLite under `data_dir`: keys, sessions, models, checkpoints, samplers, futures."""
