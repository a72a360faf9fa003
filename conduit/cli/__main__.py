"""`python -m conduit.cli`: the same as the script `conduit`."""

from conduit.cli import main

main()
