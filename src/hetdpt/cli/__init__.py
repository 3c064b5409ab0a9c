"""The command line: parse, call, print. torch is imported by the commands that need it, not by ``--help``."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from difflib import get_close_matches
from functools import partial
from typing import Any

import click

from hetdpt.cli import (
    collect,
    explain,
    frontier,
    models,
    observe,
    oneshot,
    predict,
    report,
    run,
    scan,
    select,
    tasks,
    tokens,
    training,
    transfer,
    width,
)
from hetdpt.cli.command import Commands
from hetdpt.cli.show import is_first_process
from hetdpt.cli.stopping import Stopped, farewell, one_line, reason, stoppable
from hetdpt.core.errors import HetDPTError


def _task(name: str, help: str, task: str) -> Commands:
    functions = {"train": partial(tasks.train, task=task), "eval": partial(tasks.eval_, task=task)}
    return Commands(name, help, {"Commands": functions})


app = Commands(
    "hetdpt",
    "Make Vision Transformers faster by removing attention layers and FFN activations.",
    {
        "Start here": {
            "run": run.run,
            "demo": run.demo,
            "status": report.status,
            "report": report.report,
        },
        "Look at a model": {
            "inspect": models.inspect,
            "scan": scan.scan,
            "observe": observe.observe,
            "explain": explain.explain,
            "bench": models.bench,
            "eval": training.eval_,
        },
        "Make a model faster without training": {
            "oneshot": oneshot.oneshot,
            "frontier": frontier.frontier,
            "apply": models.apply,
            "width": width.width,
            "tokens": tokens.tokens,
        },
        "Single steps of a run": {
            "collect": collect.collect,
            "predict": predict.predict,
            "select": select.select,
            "compare": select.compare,
            "train": training.train,
            "recover": training.recover,
            "recipes": training.recipes,
        },
        "Use a model elsewhere": {
            "export": models.export,
            "push": models.push,
            "transfer": transfer.transfer,
            "detect": _task("detect", "Find objects with a model as the backbone: train, eval.", "detection"),
            "segment": _task(
                "segment", "Classify every pixel with a model as the backbone: train, eval.", "segmentation"
            ),
        },
    },
)


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from hetdpt import __version__

        click.echo(f"hetdpt {__version__}")
        ctx.exit()


version: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": _print_version}
app.params.append(click.Option(["--version"], help="Print the version.", **version))


def main() -> None:
    """Run the command line; a foreseeable failure is one sentence on stderr and exit code 2."""
    warnings.showwarning = _show_warning
    try:
        with stoppable():
            _require_no_empty(sys.argv[1:])
            code = app(prog_name="hetdpt", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        _leave(error.exit_code)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "hetdpt"
        _refuse(f"{_sentence(error)}; {command} --help lists all {'commands' if command == 'hetdpt' else 'options'}")
    except (HetDPTError, OSError) as error:
        _refuse(reason(error) if isinstance(error, OSError) else str(error))
    except Stopped as stopped:
        if is_first_process():
            click.echo(farewell(stopped), err=True)
        _leave(stopped.code)
    else:
        _leave(code or 0)


def _refuse(text: str) -> None:
    rank = os.environ.get("RANK", "0")
    place = "" if rank == "0" else f" in process {rank}"
    click.echo(f"error{place}: {one_line(text)}", err=True)
    _leave(2)


def _sentence(error: click.UsageError) -> str:
    """Return what is wrong with the words of a command, as part of a sentence."""
    if isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter) and error.param:
        return f"{error.param.opts[0]}: {error.message.removesuffix('.')}"
    near = get_close_matches(getattr(error, "option_name", ""), getattr(error, "possibilities", None) or (), 1, 0)
    text = error.message.partition(" Did you mean")[0] if near else error.format_message()
    hint = f" (did you mean {near[0]}?)" if near else ""
    return text[:1].lower() + text[1:].strip().rstrip(".") + hint


def _require_no_empty(words: list[str]) -> None:
    """Raise ``HetDPTError`` for a word without letters, such as "" of a variable that a shell script has not set."""
    for number, word in enumerate(words):
        name, is_option, value = word.partition("=")
        if word.strip() and not (word.startswith("--") and is_option and not value.strip()):
            continue
        before = words[number - 1] if number else ""
        what = name if is_option else before if before.startswith("-") else "an argument"
        raise HetDPTError(f"{what} is empty; give it a value, or leave it out")


def _leave(code: int) -> None:
    """End this process with exit code ``code``.

    In a process group, threads outlive ``destroy_process_group`` where something still holds the group. At the end of
    the program they now and then abort the process, so that end is left out: all that Python has to do is done here.
    """
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        from hetdpt.core.processes import is_distributed

        if is_distributed():
            dist.destroy_process_group()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    sys.exit(code)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    click.echo(f"warning: {message}", err=True)
