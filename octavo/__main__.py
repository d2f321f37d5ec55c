"""``python -m octavo``: the same command line as the ``octavo`` script."""

from .server.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
