"""Parses rdzvrun's command line in the same way as torchrun.

Every torchrun flag is accepted in both spellings (dashes and underscores). As with torchrun,
PET_<NAME> in the environment is the default for --<name>. `rdzvctl submit` takes the same flags.
`declared_flags` lists the flags; `job_options` and the agent's `options` interpret them.

Source: `torch/distributed/run.py` and `torch/distributed/argparse_util.py` of torch 2.13.
"""

from __future__ import annotations

import argparse
import copy
import functools
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import NoReturn

from rdzv.errors import InvalidRequestError, did_you_mean
from rdzv.launch_options.declared_flags import GROUPS, LEGACY_FLAGS, NO_WARM, OWN, Option
from rdzv.structs import struct
from rdzv.version import VERSION

DESCRIPTION = """\
Run a distributed PyTorch job on this node; a drop-in for torchrun.

  one machine        rdzvrun --standalone --nproc-per-node=2 --max-restarts=3 train.py
  several machines   rdzvrun --rdzv-endpoint=HEAD --rdzv-id=night --nnodes=2:4 train.py
"""
EPILOG = """\
PET_<NAME> in the environment is the default of --<name>.

exit codes:
  0      success
  1      the job failed; with --exit-code=root-cause that of the worker that failed
  2      the command line is wrong
  75     no server, or too few nodes; try again
  77     permission denied
  93     the job made no progress; do not requeue it
  128+n  ended by signal n; 130 is Ctrl-C
"""


def parse(
    argv: Sequence[str] | None, environ: Mapping[str, str], *, legacy: bool = False
) -> argparse.Namespace:
    """Parse a command line, taking defaults from PET_* variables in `environ`.

    `legacy` adds --use-env, as in torch.distributed.launch.

    Raises:
        InvalidRequestError: wrong usage.
        SystemExit: --help, --version or --print-completion is done (0).

    """
    defaults = tuple((key, environ[key]) for key in sorted(environ) if key.startswith("PET_"))
    parser = _kept_parser(defaults, legacy)
    given, rest = split(sys.argv[1:] if argv is None else argv, options(parser))
    if rest in ([], ["--"]) and not _answers(given):
        raise InvalidRequestError("what is to run is missing; give a script after the flags")
    return parser.parse_split(given, rest)


def refuse_answers(argv: Sequence[str]) -> None:
    """Refuse flags that print something and exit, for a command line that runs in a daemon."""
    given, _ = split(argv, options(_kept_parser((), False)))
    if answers := _answers(given):
        raise InvalidRequestError(f"{answers[0]} runs nothing; leave it out")


def _answers(given: Sequence[Given]) -> list[str]:
    return [each.words[0] for each in given for action in each.actions if action.dest in _ANSWERS]


@functools.lru_cache(maxsize=4)
def _kept_parser(defaults: tuple[tuple[str, str], ...], legacy: bool) -> Parser:
    """Keep parsers: an agent parses one submission after the other with the same defaults."""
    return make_parser(dict(defaults), legacy=legacy)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are raised like all others, instead of printed below the usage."""

    def error(self, message: str) -> NoReturn:
        # argparse names both spellings of a flag.
        text = re.sub(r"^argument (-[^/:]*)[^:]*: ", r"\1: ", message)
        raise InvalidRequestError(f"{text}; see {self.prog} --help")

    def parse_split(self, given: Sequence[Given], rest: Sequence[str]) -> argparse.Namespace:
        """Parse what `split` has returned."""
        name = rest[0].partition("=")[0] if rest else ""
        if name.startswith("-") and name.strip("-"):
            known = [flag for flag in options(self) if "_" not in flag]
            remedy = did_you_mean(name, known, f"see {self.prog} --help")
            raise InvalidRequestError(f"{name} is not a flag; {remedy}")
        return self.parse_args([*(word for each in given for word in each.words), *rest])

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            flag = next(name for name in action.option_strings if name.startswith("--"))
            valid = ", ".join(action.choices)
            remedy = did_you_mean(str(value), action.choices, "give one of them")
            raise InvalidRequestError(f"{flag}={value} is not one of {valid}; {remedy}")


@struct(frozen=True)
class Given:
    """A flag as given: its words, the first of which contains its full name, and its actions."""

    actions: tuple[argparse.Action, ...]
    """One action, or one for each short flag in a word, of which only the last may take a value."""
    words: tuple[str, ...]


def split(
    argv: Sequence[str], options: Mapping[str, argparse.Action], whole: Set[str] = OWN
) -> tuple[list[Given], list[str]]:
    """Split a command line into its flags and the words after them, expanding abbreviations.

    As in torchrun, an abbreviation means the only torchrun flag that begins with it. Flags that
    torchrun lacks (`whole`) cannot be abbreviated. The words after the flags are the script and its
    arguments, or begin with a word that argparse refuses.

    Raises:
        InvalidRequestError: several torchrun flags begin with an abbreviation.

    """
    given: list[Given] = []
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "--":
        name, equals, value = argv[at].partition("=")
        if name.startswith("--"):
            name = _written_out(name, options, whole)
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


def _written_out(name: str, options: Mapping[str, argparse.Action], whole: Set[str]) -> str:
    """Expand an abbreviated flag, or return any other word unchanged for argparse to refuse."""
    if name in options:
        return name
    meant = {
        id(action): option
        for option, action in options.items()
        if option.startswith(name) and action.option_strings[0] not in whole
    }
    if len(meant) > 1:
        candidates = sorted(option.replace("_", "-") for option in meant.values())
        raise InvalidRequestError(f"{name} may be {' or '.join(candidates)}; write one of them out")
    return next(iter(meant.values()), name)


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


def options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {name: action for action in parser._actions for name in action.option_strings}


def add(
    parser: argparse._ActionsContainer,
    option: Option,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> argparse.Action:
    names, settings = option
    both = dict.fromkeys((*names, *(_underscored(name) for name in names)))
    action = parser.add_argument(*both, **settings)
    variable = f"PET_{action.dest.upper()}"
    text = environ.get(variable)
    if text is None or option is NO_WARM or action.dest in _WITHOUT_ENVIRONMENT:
        return action
    if action.nargs != 0:
        # argparse parses a string default like a given value.
        action.default = text
    elif text.isdecimal():
        action.default = bool(int(text))
    else:
        raise InvalidRequestError(f"{variable}={text} is not 0 or 1; set it to one of them")
    return action


def add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("training_script", metavar="script", help="script, module or program")
    parser.add_argument(
        "training_script_args", nargs=argparse.REMAINDER, metavar="...", help="its arguments"
    )


def make_parser(environ: Mapping[str, str], *, legacy: bool) -> Parser:
    program = "python -m rdzv.agent.distributed_launch" if legacy else "rdzvrun"
    parser = Parser(
        prog=program,
        usage=f"{program} [flags] script [its arguments]",
        formatter_class=HelpFormatter,
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rdzvrun {VERSION}")
    parser.add_argument(
        *("--print-completion", "--print_completion"),
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print the script that completes rdzvrun's flags in this shell; needs shtab",
    )
    for title, options_ in GROUPS.items():
        group = parser.add_argument_group(title)
        for option in options_:
            add(group, option, environ)
    for option in LEGACY_FLAGS if legacy else ():
        add(parser, option, environ)
    add_script(parser)
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


_ANSWERS = frozenset({"help", "version", "print_completion"})
"""Flags that print something and exit, by dest."""

_WITHOUT_ENVIRONMENT = frozenset(
    {
        *("numa_binding", "logs_specs", "help", "version", "use_env", "print_completion"),
        # These are set by RDZV_* variables instead, as for rdzvctl and the plug-in.
        *("tls_ca", "tls_cert", "tls_key", "token_file"),
    }
)


def _underscored(name: str) -> str:
    return "--" + name[2:].replace("-", "_") if name.startswith("--") else name
