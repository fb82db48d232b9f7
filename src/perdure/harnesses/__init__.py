"""What runs the agent loop inside one turn: performers of steps."""
