"""`python -m penstock.cli`."""

from penstock.cli.main import main

main()
