"""The session that users hold, its life cycle and its steps."""
