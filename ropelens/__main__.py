"""Entry point of `python -m ropelens`, which torchrun and accelerate can launch."""

from ropelens.commands.app import main

main()
