"""`python -m trl_ext.cli`: the command line in this process, as `accelerate launch -m trl_ext.cli` starts it."""

from .main import main

if __name__ == "__main__":
    raise SystemExit(main(may_launch=False))
