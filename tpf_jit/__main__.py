"""`python -m tpf_jit` is the command line `tpf-jit`."""

from tpf_jit.cli import main

if __name__ == "__main__":
    main()
