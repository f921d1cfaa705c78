"""`tideline bench sao`: SAO against its baselines and ablations, in process, on small models and simulated users.

    suites -> runs (task x variant x staleness x seed, one process each) -> CSV per run -> one table, plots

Start at `run.py`: it is the whole experiment on one screen.
"""
