"""Models: targets, loading, and the check at load time."""
