"""Serving steps as events: what a schedule makes of measured costs (xLLM's schedules on paper)."""
