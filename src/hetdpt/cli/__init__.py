"""The command line: parse, call, print. torch is imported by the commands that need it, not by ``--help``."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer

from hetdpt.cli import models, oneshot, scan, training
from hetdpt.errors import HetDPTError

app = typer.Typer(
    help="Make Vision Transformers faster by removing attention layers and FFN activations.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

COMMANDS: tuple[Callable[..., None], ...] = (
    models.inspect,
    models.bench,
    models.apply,
    scan.scan,
    oneshot.oneshot,
    training.train,
    training.recover,
    training.recipes,
    models.export,
    models.push,
    models.demo,
)
for command in COMMANDS:
    app.command()(command)
app.command("eval")(training.eval_)


def main() -> None:
    """Run the command line; a foreseeable failure is one sentence on stderr and exit code 2."""
    warnings.showwarning = _show_warning
    try:
        app()
    except (HetDPTError, OSError) as error:
        rank = os.environ.get("RANK", "0")
        typer.echo(f"error: {error}" if rank == "0" else f"error in process {rank}: {error}", err=True)
        sys.exit(2)
    finally:
        _leave()


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from hetdpt import __version__

        typer.echo(f"hetdpt {__version__}")
        raise typer.Exit


def _leave() -> None:
    """Leave the group of processes in order; its threads would else be cut off, and now and then abort the process."""
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    typer.echo(f"warning: {message}", err=True)
