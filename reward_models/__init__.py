"""Outcome reward models: functions from (messages, response) to a score."""
