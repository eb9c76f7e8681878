"""Parses rdzvrun's command line in the same way as torchrun.

Every torchrun flag is accepted in both spellings (dashes and underscores). As with torchrun,
PET_<NAME> in the environment is the default for --<name>. `rdzvctl submit` takes the same flags.
`declared_flags` lists the flags; `kinds` parses their values.

Source: `torch/distributed/run.py` and `torch/distributed/argparse_util.py` of torch 2.13.
"""

from __future__ import annotations

import argparse
import copy
import functools
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from rdzv.core.model import Settings
from rdzv.errors import InvalidRequestError, did_you_mean
from rdzv.launch_options.declared_flags import GROUPS, LEGACY_FLAGS, Flag
from rdzv.structs import field_names, struct
from rdzv.version import VERSION

DESCRIPTION = """\
Run a distributed PyTorch job on this node; a drop-in for torchrun.

  one machine        rdzvrun --standalone --nproc-per-node=2 --max-restarts=3 train.py
  several machines   rdzvrun --rdzv-endpoint=HEAD --rdzv-id=night --nnodes=2:4 train.py
"""
EPILOG = """\
--help-all shows all flags. PET_<NAME> in the environment is the default of --<name>.

exit codes:
  0      success
  1      the job failed; with --exit-code=root-cause that of the worker that failed
  2      the command line is wrong
  75     no server, or too few nodes; try again
  77     permission denied
  93     the job made no progress; do not requeue it
  128+n  ended by signal n; 130 is Ctrl-C
"""

COMMON = frozenset({
    *("standalone", "nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id"),
    *("max_restarts", "module", "hang_timeout", "snapshot_dir", "log_dir", "tee"),
})  # fmt: skip
"""The flags that --help shows, by dest."""

DEFAULT_BACKOFF_MS = (1_000, 60_000)
"""The default first and longest wait between consecutive restarts."""


def parse(
    argv: Sequence[str] | None, environ: Mapping[str, str], *, legacy: bool = False
) -> argparse.Namespace:
    """Parse a command line, taking defaults from PET_* variables in `environ`.

    `legacy` adds --use-env, as in torch.distributed.launch.

    Raises:
        InvalidRequestError: wrong usage.
        SystemExit: --help, --help-all, --version or --print-completion is done (0).

    """
    defaults = tuple((key, environ[key]) for key in sorted(environ) if key.startswith("PET_"))
    parser = _kept_parser(defaults, legacy)
    given, rest = parser.split(sys.argv[1:] if argv is None else argv)
    if rest in ([], ["--"]) and not _answers(given):
        raise InvalidRequestError(
            "what is to run is missing; give a script after the flags (--help shows them)"
        )
    return parser.parse_split(given, rest)


def refuse_answers(argv: Sequence[str]) -> None:
    """Refuse flags that print something and exit, for a command line that runs in a daemon."""
    given, _ = _kept_parser((), False).split(argv)
    if answers := _answers(given):
        raise InvalidRequestError(f"{answers[0]} runs nothing; leave it out")


def _answers(given: Sequence[Given]) -> list[str]:
    return [each.words[0] for each in given for action in each.actions if action.dest in _ANSWERS]


@functools.lru_cache(maxsize=4)
def _kept_parser(defaults: tuple[tuple[str, str], ...], legacy: bool) -> Parser:
    """Keep parsers: an agent parses one submission after the other with the same defaults."""
    return make_parser(dict(defaults), legacy=legacy)


def same_named(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """Return the values of the flags that fill the fields of a struct."""
    return {name: getattr(args, name) for name in field_names(kind) if name in args}


def read_settings(args: argparse.Namespace) -> Settings:
    conf = args.rdzv_conf
    min_nodes, max_nodes = args.nnodes
    scale_up, scale_up_after_ms = conf["scale_up"]
    backoff_ms, backoff_max_ms = _flag_or_key(args, "restart_backoff") or DEFAULT_BACKOFF_MS
    return Settings(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        join_timeout_ms=conf["join_timeout"],
        last_call_timeout_ms=conf["last_call_timeout"],
        scale_up=scale_up,
        scale_up_after_ms=scale_up_after_ms,
        restart_window_ms=_flag_or_key(args, "restart_window") or 0,
        restart_backoff_ms=backoff_ms,
        restart_backoff_max_ms=backoff_max_ms,
        **same_named(args, Settings),
    )


def _flag_or_key(args: argparse.Namespace, key: str) -> Any:
    flag, in_conf = getattr(args, key), args.rdzv_conf[key]
    if flag is not None and in_conf is not None and flag != in_conf:
        name = f"--{key.replace('_', '-')}"
        raise InvalidRequestError(f"{name} and {key} in --rdzv-conf differ; leave one of them out")
    return in_conf if flag is None else flag


class Parser(argparse.ArgumentParser):
    """A parser whose errors are raised like all others, instead of printed below the usage."""

    def __init__(self, **settings: Any) -> None:
        self.own: set[str] = set()
        """The names of flags that cannot be abbreviated."""
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, **settings)

    @property
    def options(self) -> dict[str, argparse.Action]:
        return {name: action for action in self._actions for name in action.option_strings}

    def error(self, message: str) -> NoReturn:
        # argparse names both spellings of a flag.
        text = re.sub(r"^argument (-[^/:]*)[^:]*: ", r"\1: ", message)
        raise InvalidRequestError(f"{text}; see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            flag = next(name for name in action.option_strings if name.startswith("--"))
            valid = ", ".join(action.choices)
            remedy = did_you_mean(str(value), action.choices, "give one of them")
            raise InvalidRequestError(f"{flag}={value} is not one of {valid}; {remedy}")

    def add(
        self,
        group: argparse._ActionsContainer,
        flag: Flag,
        environ: Mapping[str, str] = MappingProxyType({}),
        *,
        hidden: bool = False,
    ) -> None:
        """Add a declared flag in both spellings; a `hidden` one is not in the help."""
        both = dict.fromkeys((*flag.names, *(_underscored(name) for name in flag.names)))
        action = group.add_argument(*both, **{"dest": flag.dest, **flag.settings})
        if hidden:
            action.help = argparse.SUPPRESS
        if flag.own:
            self.own |= both.keys()
        variable = f"PET_{flag.key.upper()}"
        text = environ.get(variable) if flag.environ else None
        if text is None:
            return
        if action.nargs != 0:
            # argparse parses a string default like a given value.
            action.default = text
        elif text.isdecimal():
            action.default = bool(int(text))
        else:
            raise InvalidRequestError(f"{variable}={text} is not 0 or 1; set it to one of them")

    def add_script(self) -> None:
        self.add_argument("training_script", metavar="script", help="script, module or program")
        self.add_argument(
            "training_script_args", nargs=argparse.REMAINDER, metavar="...", help="its arguments"
        )

    def split(self, argv: Sequence[str]) -> tuple[list[Given], list[str]]:
        """Split a command line into its flags and the words after them, expanding abbreviations.

        As in torchrun, an abbreviation means the only torchrun flag that begins with it. The words
        after the flags are the script and its arguments, or begin with what argparse refuses.
        """
        options = self.options
        given: list[Given] = []
        at = 0
        while at < len(argv) and argv[at].startswith("-") and argv[at] != "--":
            name, equals, value = argv[at].partition("=")
            if name.startswith("--"):
                name = self._written_out(name, options)
                first = f"{name}{equals}{value}"
                actions, has_value = [options[name]] if name in options else [], bool(equals)
            else:
                first = argv[at]
                actions, has_value = _short(first, options)
            if not actions:
                break
            if actions[-1].nargs == "?" and not has_value:
                # An optional value must follow `=`; the next word is the script.
                first, has_value = f"{first}={actions[-1].const}", True
            end = at + (1 if actions[-1].nargs == 0 or has_value else 2)
            given.append(Given(tuple(actions), (first, *argv[at + 1 : end])))
            at = end
        return given, list(argv[at:])

    def _written_out(self, name: str, options: Mapping[str, argparse.Action]) -> str:
        """Expand an abbreviation, or return any other word unchanged for argparse to refuse."""
        if name in options:
            return name
        meant = {
            id(action): option
            for option, action in options.items()
            if option.startswith(name) and option not in self.own
        }
        if len(meant) > 1:
            candidates = sorted(option.replace("_", "-") for option in meant.values())
            raise InvalidRequestError(
                f"{name} may be {' or '.join(candidates)}; write one of them out"
            )
        return next(iter(meant.values()), name)

    def parse_split(self, given: Sequence[Given], rest: Sequence[str]) -> argparse.Namespace:
        """Parse what `split` has returned, and refuse flags that exclude each other."""
        name = rest[0].partition("=")[0] if rest else ""
        if name.startswith("-") and name.strip("-"):
            known = [flag for flag in self.options if "_" not in flag]
            remedy = did_you_mean(name, known, f"see {self.prog} --help")
            raise InvalidRequestError(f"{name} is not a flag; {remedy}")
        args = self.parse_args([*(word for each in given for word in each.words), *rest])
        _check_together(args)
        return args


def _check_together(args: argparse.Namespace) -> None:
    if args.snapshot is not None and not args.no_progress_restarts:
        raise InvalidRequestError(
            f"--snapshot={args.snapshot} has no effect without --no-progress-restarts; give a "
            "number of restarts, or leave it out"
        )
    if args.restart_on and not args.max_restarts:
        raise InvalidRequestError(
            "--restart-on has no effect without --max-restarts; give a number of restarts, or "
            "leave it out"
        )
    for other in ("no_python", "run_path"):
        if args.module and getattr(args, other):
            name = f"--{other.replace('_', '-')}"
            raise InvalidRequestError(f"-m and {name} exclude each other; leave one of them out")
    # torch.distributed.launch always refuses this.
    if args.no_python and not getattr(args, "use_env", True):
        raise InvalidRequestError(
            "--no-python passes no --local-rank to the program; add --use-env, and read LOCAL_RANK"
        )


@struct(frozen=True)
class Given:
    """A flag as given: its words, the first of which contains its full name, and its actions."""

    actions: tuple[argparse.Action, ...]
    """One action, or one for each short flag in a word, of which only the last may take a value."""
    words: tuple[str, ...]

    @property
    def value(self) -> str | None:
        """The last flag's value, or None. Argparse refuses a flag that lacks its value."""
        _, equals, value = self.words[0].partition("=")
        return value if equals else (self.words[1] if len(self.words) > 1 else None)


def _short(word: str, options: Mapping[str, argparse.Action]) -> tuple[list[argparse.Action], bool]:
    """Return the short flags in -m, -mt or -mt1, and whether the word ends with a value.

    The list is empty if any of them is unknown.
    """
    actions = []
    for place, letter in enumerate(word[1:], start=1):
        action = options.get(f"-{letter}")
        if action is None:
            return [], False
        actions.append(action)
        if action.nargs != 0:
            return actions, place + 1 < len(word)
    return actions, False


def make_parser(environ: Mapping[str, str], *, legacy: bool) -> Parser:
    program = "python -m rdzv.agent.distributed_launch" if legacy else "rdzvrun"
    parser = Parser(
        prog=program,
        usage=f"{program} [flags] script [its arguments]",
        description=DESCRIPTION,
        epilog=EPILOG,
        add_help=False,
    )
    parser.own |= {
        "--help-all",
        "--help_all",
        "--version",
        "--print-completion",
        "--print_completion",
    }
    parser.add_argument(
        "-h", "--help", action=_CommonHelp, nargs=0, help="show the flags that most jobs need"
    )
    parser.add_argument(
        "--help-all", "--help_all", action="help", dest="help_all", help="show all flags"
    )
    parser.add_argument("--version", action="version", version=f"rdzvrun {VERSION}")
    parser.add_argument(
        *("--print-completion", "--print_completion"),
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print the script that completes rdzvrun's flags in this shell; needs shtab",
    )
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            parser.add(group, flag, environ)
    for flag in LEGACY_FLAGS if legacy else ():
        parser.add(parser, flag, environ)
    parser.add_script()
    return parser


class HelpFormatter(argparse.HelpFormatter):
    """Shows flags only with dashes, although underscores are accepted, and preserves line breaks.

    Each line is wrapped separately. Indented lines of a description are left unchanged.
    """

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if "_" not in name]
        return super()._format_action_invocation(shown)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [line for part in text.split("\n") for line in textwrap.wrap(part, width)]

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.rstrip().split("\n")
        return "\n".join(
            line if line.startswith(" ") else textwrap.fill(line, width) for line in lines
        )


class _CommonHelp(argparse.Action):
    """Shows the flags that most jobs need: all of them do not fit on a screen."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        shown = HelpFormatter(parser.prog)
        shown.add_usage(parser.usage, [], [])
        shown.add_text(parser.description)
        shown.start_section("the flags that most jobs need")
        shown.add_arguments([action for action in parser._actions if action.dest in COMMON])
        shown.end_section()
        shown.add_text(parser.epilog)
        sys.stdout.write(shown.format_help())
        parser.exit()


class _PrintCompletion(argparse.Action):
    """Prints a completion script, as torchrun 2.14 does."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        try:
            import shtab
        except ImportError:
            # As torchrun, which does not call it a wrong flag.
            parser.exit(
                1, "rdzvrun: --print-completion needs the package shtab; pip install shtab\n"
            )
        parser.prog = "rdzvrun"
        sys.stdout.write(f"{shtab.complete(parser, shell=str(values))}\n")
        parser.exit()


_ANSWERS = frozenset({"help", "help_all", "version", "print_completion"})
"""Flags that print something and exit, by dest."""


def _underscored(name: str) -> str:
    return "--" + name[2:].replace("-", "_") if name.startswith("--") else name
