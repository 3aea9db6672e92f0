"""`python -m rbn` runs the `rbn` command."""

from rbn.cli import main

if __name__ == "__main__":
    main()
