"""The application: the verbs put together, and the one place where errors become a line and an exit code."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from tpf_jit.cli import accuracy, accuracy_trimul, bench, bench_search, bench_trimul, db, doctor, kernels, records, sweep
from tpf_jit.errors import TpfError


class _Commands(typer.core.TyperGroup):
    """The verbs. Ctrl-C comes out of them as typer's `Abort`: of a KeyboardInterrupt typer makes an exit that says nothing."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise typer.Abort from interrupt


app = typer.Typer(
    name="tpf-jit",
    cls=_Commands,
    help="Triangle attention and triangle multiplication kernels: compile, tune, inspect. Every reading command takes --json.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        from tpf_jit import __version__

        print(f"tpf-jit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    pass


app.command("doctor", short_help="Check this machine, and say how to mend what is wrong.")(doctor.doctor)
app.command("compile", short_help="Compile kernels, with or without a GPU, and show their resources.")(kernels.compile_kernels)
app.command("explain")(kernels.explain)
app.command("tune")(kernels.tune)
app.command("sweep", short_help="Tune many problems in all directions, on all GPUs here or a Ray cluster.")(sweep.sweep)
app.command("demo", short_help="Show what tpf_jit does on this machine.")(kernels.demo)
app.command("accuracy", short_help="Judge implementations and gradients against float64.")(accuracy.accuracy)
app.command("accuracy-trimul", short_help="The same of the triangle multiplicative update.")(accuracy_trimul.accuracy_trimul)
bench.app.command("trimul")(bench_trimul.trimul)
bench.app.command("search")(bench_search.search)
app.add_typer(bench.app, name="bench")
app.add_typer(db.app, name="db")
app.add_typer(records.app, name="records")


def run(argv: list[str]) -> int:
    """Run the command line `argv` (without the program's name) and give the exit code."""
    command = typer.main.get_command(app)
    try:
        result: Any = command.main(args=argv, prog_name="tpf-jit", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except TpfError as error:
        return _fail(error, 1)
    except BrokenPipeError:
        return _reader_left()
    except OSError as error:
        # A folder that may not be searched, a full disk behind stdout: the system's own words say what and where.
        return _fail(error, 1)
    except SystemExit as ending:
        # Inside a command typer turns the same error into an exit with code 1.
        if isinstance(ending.__context__, BrokenPipeError):
            return _reader_left()
        raise
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        # Usage errors come from click, which typer carries inside itself or as a package, by version.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            message = error.format_message()
            if type(error).__name__ == "NoArgsIsHelpError":
                # A group without a command: its message is the help.
                print(message, file=sys.stderr)
                return error.exit_code
            return _fail(message, error.exit_code) if message else error.exit_code
        raise


def _reader_left() -> int:
    """The reader (head, less) has what it wanted; stdout goes elsewhere so that the flush at exit is silent too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def _fail(error: object, code: int) -> int:
    print(f"Error: {error}", file=sys.stderr)
    return code
