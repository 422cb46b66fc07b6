"""``python -m draftproof`` is the ``draftproof`` command."""

from draftproof.cli.app import main

if __name__ == "__main__":
    main()
