"""Small things every floor may use: argument checks, the log, the environment, deadlines."""
