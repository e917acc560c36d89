"""Scheduler-only experiments: simulated episodes, their scores, presets and benches."""
