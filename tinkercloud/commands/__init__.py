"""What the command line does, one file for each command."""
