"""The asynchronous SAO learner: read `learner/loop.py` first."""
