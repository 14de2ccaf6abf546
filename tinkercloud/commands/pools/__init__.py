"""`tinkercloud pool`: spare machines that serve one model with llama.cpp."""
