"""The command line: ``octavo serve [MODEL] [flags]``, ``octavo models`` and ``octavo --version``.

Flags are generated from ``engine.config``; a flag beats the ``--config`` file, which beats the
default. Anything wrong is one sentence on stderr and exit code 2, before anything is loaded.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any, NoReturn

from .. import __version__
from ..engine.config.engine_config import EngineConfig
from ..engine.config.environment import resolve_server
from ..engine.config.options import flag_of
from ..engine.config.sections import all_options, default_text
from ..engine.config.server_config import ServerConfig
from ..engine.errors import ConfigError
from ..engine.logs import one_line
from .listening import check_listening
from .models_table import add_arguments, render
from .option_values import parse_text
from .presets import load_preset, preset_names
from .suggestions import unknown_option

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_OPTIONS: dict[str, Field[Any]] = {field.name: field for _, field in all_options()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; by default the process's.

    Returns:
        The exit code: 0, 1 if the engine died, 2 if octavo refused to start.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        command = _command_parser().parse_args(argv[:1])
        if command.command is None:
            print("octavo: say what to do, as in: octavo serve MODEL", file=sys.stderr)
            return EXIT_USAGE
        if command.command == "models":
            print(_models(argv[1:]), end="")
            return 0
        engine_config, server_config = resolve(argv[1:])
        from .launch import run

        return run(engine_config, server_config)
    except ConfigError as error:
        print(f"octavo: {one_line(str(error))}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:  # before the server listens to signals
        return EXIT_INTERRUPTED


def _models(arguments: Sequence[str]) -> str:
    parser = _Parser(
        prog="octavo models",
        description="List the models of this machine: those of the Hub's cache, the embedded one and those of PATHs.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    given = parser.parse_args(list(arguments))
    from .launch import list_models

    return render(list_models(given.paths, given.download_dir), as_json=given.json)


def resolve(arguments: Sequence[str]) -> tuple[EngineConfig, ServerConfig]:
    """The configuration that the arguments of ``octavo serve`` mean.

    Raises:
        ConfigError: one of them, or of the file's keys, is wrong or unknown.
    """
    given = _parse_flags(arguments)
    config_file = given.pop("config", None)
    options = load_preset(config_file, _OPTIONS) if config_file else {}
    options |= given
    server_names = {field.name for field in fields(ServerConfig)}
    server = {name: value for name, value in options.items() if name in server_names}
    engine = {name: value for name, value in options.items() if name not in server_names}
    return EngineConfig.from_options(engine), _checked(resolve_server(ServerConfig(**server)))


def _checked(config: ServerConfig) -> ServerConfig:
    if config.api_key is not None and not all(config.api_key):
        raise ConfigError("--api-key must not be empty.")
    if config.served_model_name is not None and not all(config.served_model_name):
        raise ConfigError("--served-model-name must not be empty.")
    for name in config.served_model_name or ():
        if not name.isprintable():
            raise ConfigError(f"--served-model-name must be printable, on one line, got {name!r}.")
    check_listening(config)
    return config


def _parse_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """What was given on the command line, by option name."""
    parsed, left = serve_parser().parse_known_args(list(arguments))
    if left:
        flags = [argument for argument in left if argument.startswith("-")]
        raise ConfigError(
            unknown_option(flags[0], list(_OPTIONS)) if flags else f"What is {left[0]!r} for?"
        )
    given = vars(parsed)
    model = given.pop("positional_model", None)
    if model is not None:
        if "model" in given:
            raise ConfigError("--model and the argument MODEL exclude each other.")
        given["model"] = model
    if "model" not in given:
        _refuse_swallowed_model(given)
    return {name: _value(name, value) for name, value in given.items()}


def _refuse_swallowed_model(given: dict[str, Any]) -> None:
    """An option with several values takes every word after it, the model's too."""
    for name, values in given.items():
        for value in values if isinstance(values, list) else ():
            if value.endswith(".gguf") or os.path.isdir(value):
                raise ConfigError(
                    f"{flag_of(name)} takes every word after it: put the model first, as in "
                    f"octavo serve MODEL {flag_of(name)} ..."
                )


def _value(name: str, given: Any) -> Any:
    option = _OPTIONS.get(name)
    if option is None or isinstance(given, bool):
        return given
    if isinstance(given, list):
        return tuple(parse_text(option, text) for text in given)
    return parse_text(option, given)


class _Parser(argparse.ArgumentParser):
    """Reports by raising, in one sentence."""

    def error(self, message: str) -> NoReturn:
        expected = re.match(r"argument (?:.*/)?(--[\w-]+): expected .*argument", message)
        if expected:
            raise ConfigError(f"{expected[1]} needs a value.")
        raise ConfigError(f"{message.removesuffix('.')}.")


def _command_parser() -> _Parser:
    parser = _Parser(
        prog="octavo",
        description="Serves a language model over the OpenAI API.",
        epilog="octavo serve --help and octavo models --help list every option.",
    )
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    parser.add_argument(
        "command",
        choices=("serve", "models"),
        nargs="?",
        help="serve: start the server; models: list the models of this machine.",
    )
    return parser


def serve_parser() -> argparse.ArgumentParser:
    """The parser of ``octavo serve``: every option of ``engine.config`` is a flag."""
    parser = _Parser(
        prog="octavo serve",
        usage="octavo serve [MODEL] [flags]",
        description="Serve a model. A flag beats the --config file, which beats the default.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "positional_model", metavar="MODEL", nargs="?", help="The same as --model MODEL."
    )
    presets = ", ".join(preset_names())
    parser.add_argument(
        "--config", metavar="FILE", help=f"YAML file with options, or a preset: {presets}."
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for section, option in all_options():
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        _add_flag(groups[section], option)
    return parser


def _add_flag(group: argparse._ArgumentGroup, option: Field[Any]) -> None:
    meta = option.metadata
    flag, text = flag_of(option.name), _help_text(option).replace("%", "%%")
    if meta["kind"] == "bool":
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        return
    metavar = "{" + ",".join(meta["choices"]) + "}" if meta["choices"] else _METAVARS[meta["kind"]]
    nargs = "+" if meta["kind"] == "strs" else None
    group.add_argument(flag, metavar=metavar, nargs=nargs, help=text)


_METAVARS = {"str": "TEXT", "strs": "TEXT", "int": "N", "size": "N[k|m|g|Ki|Mi|Gi]", "float": "X"}


def _help_text(option: Field[Any]) -> str:
    unit = option.metadata["unit"]
    unit_text = f" Unit: {unit}." if unit else ""
    return f"{option.metadata['help']}{unit_text} Default: {default_text(option)}."
