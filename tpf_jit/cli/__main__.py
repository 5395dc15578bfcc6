"""`python -m tpf_jit.cli`, the same as `tpf-jit`, for places where scripts are not on the path."""

from tpf_jit.cli import main

if __name__ == "__main__":
    main()
