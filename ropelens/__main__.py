"""Entry point of `python -m ropelens`, which torchrun and accelerate can launch."""

from __future__ import annotations

from ropelens.commands.app import main

main()
