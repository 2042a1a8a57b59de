"""`python -m polyscale.cli`, for launchers such as torchrun."""

from polyscale.cli import main

if __name__ == "__main__":
    main()
