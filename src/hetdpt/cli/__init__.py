"""The command line: parse, call, print. torch is imported by the commands that need it, not by ``--help``."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer

from hetdpt.cli import (
    collect,
    compare,
    demo,
    explain,
    models,
    observe,
    oneshot,
    predict,
    report,
    run,
    scan,
    select,
    status,
    tasks,
    tokens,
    training,
    transfer,
    width,
)
from hetdpt.cli.stopping import Stopped, farewell, one_line, reason, stoppable
from hetdpt.core.errors import HetDPTError

app = typer.Typer(
    help="Make Vision Transformers faster by removing attention layers and FFN activations.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

COMMANDS: tuple[Callable[..., None], ...] = (
    run.run,
    status.status,
    report.report,
    models.inspect,
    models.bench,
    models.apply,
    scan.scan,
    observe.observe,
    explain.explain,
    collect.collect,
    oneshot.oneshot,
    width.width,
    tokens.tokens,
    transfer.transfer,
    predict.predict,
    compare.compare,
    select.select,
    training.train,
    training.recover,
    training.recipes,
    models.export,
    models.push,
    demo.demo,
)
for command in COMMANDS:
    app.command()(command)
app.command("eval")(training.eval_)
TASKS = {
    "detect": ("detection", "Find objects with a model as the backbone: train, eval."),
    "segment": ("segmentation", "Tell the class of every pixel with a model as the backbone: train, eval."),
}
for name, (task, words) in TASKS.items():
    app.add_typer(tasks.app_of(task, words), name=name)


def main() -> None:
    """Run the command line; a foreseeable failure is one sentence on stderr and exit code 2."""
    warnings.showwarning = _show_warning
    try:
        with stoppable():
            _require_no_empty(sys.argv[1:])
            app()
    except (HetDPTError, OSError) as error:
        rank = os.environ.get("RANK", "0")
        text = one_line(reason(error) if isinstance(error, OSError) else str(error))
        typer.echo(f"error: {text}" if rank == "0" else f"error in process {rank}: {text}", err=True)
        _leave(2)
        sys.exit(2)
    except Stopped as stopped:
        if os.environ.get("RANK", "0") == "0":
            typer.echo(farewell(stopped), err=True)
        _leave(stopped.code)
        sys.exit(stopped.code)
    except SystemExit as end:  # typer's way of being done
        _leave(end.code)
        raise


def _require_no_empty(words: list[str]) -> None:
    """Raise ``HetDPTError`` for a word without letters, such as "" of a variable that a shell script has not set."""
    for number, word in enumerate(words):
        name, is_option, value = word.partition("=")
        if word.strip() and not (word.startswith("--") and is_option and not value.strip()):
            continue
        before = words[number - 1] if number else ""
        what = name if is_option else before if before.startswith("-") else "an argument"
        raise HetDPTError(f"{what} is empty; give it a value, or leave it out")


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from hetdpt import __version__

        typer.echo(f"hetdpt {__version__}")
        raise typer.Exit


def _leave(code: object) -> None:
    """End this process with exit code ``code`` if it is one of a group.

    Threads of the group outlive ``destroy_process_group`` where something still holds it. At the end of the program
    they now and then abort the process, so the end is left out: what Python has to do is done, the rest is memory.
    """
    if "torch.distributed" not in sys.modules:
        return
    import torch.distributed as dist

    from hetdpt.core.processes import is_distributed

    if is_distributed():
        dist.destroy_process_group()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    typer.echo(f"warning: {message}", err=True)
