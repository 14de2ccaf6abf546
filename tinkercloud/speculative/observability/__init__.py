"""What is seen of speculation: counters, calibration, the log and plot of acceptance."""
