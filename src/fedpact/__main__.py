"""`python -m fedpact`, the command line where no script of its name is on the path."""

from fedpact.cli.main import main

if __name__ == "__main__":
    main()
