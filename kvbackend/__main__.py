"""`python -m kvbackend` is the `kvbackend` command."""

from kvbackend.cli import main

raise SystemExit(main())
