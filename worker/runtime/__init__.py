"""The only place that starts tasks and threads."""
