"""What an agent sampled, turn by turn: what continues what, trajectories, rewards, datums. Pure."""
