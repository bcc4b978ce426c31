"""The processes of a run: what they exchange, and work that they divide."""
