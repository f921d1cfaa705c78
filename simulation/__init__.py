"""Simulated users with shifting taste, as plain HTTP clients, and the style corpus they judge by."""
