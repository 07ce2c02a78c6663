"""`python -m worker.cli`."""

from worker.cli import main

main()
