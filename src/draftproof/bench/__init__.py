"""What it costs: measurements of the engine as a user runs it."""
