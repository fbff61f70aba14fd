"""Looking inside a model: what it computes on the way, what that says, and pictures of it."""
