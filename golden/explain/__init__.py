"""Small experiments for learners: each prints what it does, step by step, in seconds on a CPU."""
