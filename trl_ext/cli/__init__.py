"""The command line `trl-ext`: what a user asks for by arguments, handed on to the trainers and to `memory/`."""
