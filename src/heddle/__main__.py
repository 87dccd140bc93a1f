"""`python -m heddle` is `heddle`."""

from heddle.cli.main import main

if __name__ == "__main__":
    main()
