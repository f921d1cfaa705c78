"""`python -m learner`: run the learner with threads that sleep, not spin, while they wait for each other.

Engine and learner share their cores. A spinning OpenMP thread takes the core that the thread it waits for needs: a
step was measured 20 times slower on two busy cores. OpenMP reads its environment once, when torch is imported.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from learner.process import main

if __name__ == "__main__":
    main()
