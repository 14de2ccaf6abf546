"""What the server does, without HTTP. Each service takes the user first and decides everything."""
