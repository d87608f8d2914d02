"""`python -m ascend_ln_fuse`: the command `ascend-ln-fuse`."""

from .cli import main

main(prog_name="ascend-ln-fuse")
