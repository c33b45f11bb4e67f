"""`python -m simulation --seed N --transfers N`: run a world, say what was met, and on failure how to see it again."""

from simulation.main import main

main()
