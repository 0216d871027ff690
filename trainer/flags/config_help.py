"""--help: the flags in groups; --helpfull: also the config fields; --completion: a shell script.

    print(describe_flags(__doc__))
    print(describe_fields(Config()))
    print(completion_script("bash", Config()))      # --completion=bash

The descriptions of fields are those of the docstrings. `source <(python -m trainer
--completion=bash)` completes flags, their values and the config fields of a config file, in
`python -m trainer` and in the command `tf-distribution-trainer`. zsh runs the same script, by its
emulation of bash's completion. Other command lines of python are completed as before.
"""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from absl import flags

from trainer.flags import DEFINED, FLAGS, SCOPES, own_flags

MOST_USED = (
    "config",
    "strategy",
    "model_dir",
    "data_dir",
    "batch_size",
    "learning_rate",
    "train_steps",
    "workers",
)
_START = {"check", "completion", "data_cache_bytes", "data_cache_dir", "download_only", "epochs"}
_START |= {"plain", "quiet", "traceback", "verbose"}
_CONFIG = """\
config:
  --config.FIELD=VALUE sets any field, for example --config.clip.global_norm=1.
  --helpfull describes all fields, and all flags in full."""
_ENTRY = re.compile(r"^(?P<names>\w+(?:, \w+)*): (?P<text>.*(?:\n[ ]{4,}.*)*)", re.MULTILINE)
_WIDTH, _TEXT_COLUMN = 80, 22

_PROGRAM = "tf-distribution-trainer"
_FILES = ("config", "model_dir", "data_dir", "data_cache_dir")

_SCRIPT = """\
# bash completion for this program. For each shell: source <(python -m trainer --completion=bash)
_tf_distribution_trainer() {
    local current=${COMP_LINE:0:$COMP_POINT}
    current=${current##*[[:space:]]}
    if [[ $1 != %(program)s && ${COMP_LINE} != *" -m trainer "* ]]; then
        if [[ $_tf_distribution_trainer_former == *" -F "* ]]; then
            local former=${_tf_distribution_trainer_former##* -F }
            "${former%%%% *}" "$@"
        fi
        return
    fi
    local words="%(words)s"
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ $current == --*=* ]]; then
        local value=${current#*=}
        case $current in
            %(files)s) COMPREPLY+=($(compgen -f -- "$value")) ;;
        esac
        # "=" divides words: bash replaces what follows it.
        COMPREPLY=("${COMPREPLY[@]#"${current%%%%=*}="}")
    fi
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]]; then
        compopt -o nospace 2> /dev/null
    fi
}
complete -o default -o nosort -F _tf_distribution_trainer %(program)s
if [[ -n ${ZSH_VERSION-} ]]; then
    if [[ ${_comps[python]} != _tf_distribution_trainer* ]]; then
        _tf_distribution_trainer_former=${_comps[python]:-_default}
    fi
    _tf_distribution_trainer_python() {
        if [[ "${words[*]}" == *" -m trainer "* ]]; then
            _bash_complete -o default -F _tf_distribution_trainer
        else
            $_tf_distribution_trainer_former "$@"
        fi
    }
    compdef _tf_distribution_trainer_python python python3
else
    { complete -p python || _comp_load python || _completion_loader python; } &> /dev/null
    if [[ $(complete -p python 2> /dev/null) != *_tf_distribution_trainer* ]]; then
        _tf_distribution_trainer_former=$(complete -p python 2> /dev/null)
    fi
    complete -o default -o nosort -F _tf_distribution_trainer python python3
fi
"""
_ZSH = "autoload -Uz bashcompinit && bashcompinit\n"
_FISH = """\
# fish completion for this program. For each shell: python -m trainer --completion=fish | source
set -l words %(words)s
complete -c %(program)s -a "$words"
complete -c python -c python3 -n 'string match -q -- "* -m trainer *" (commandline -cp)' -a "$words"
"""


def describe_flags(usage: str) -> str:
    """Returns `usage`, and the first sentence about each flag of the program, in groups."""
    own = [flag.name for flag in own_flags()]
    lines = [usage.strip()]
    for group in ("used most", "start", "run", "cluster", "parameter servers", "this command"):
        names = [name for name in own if _group_of(name) == group]
        lines += ["", f"{group}:"] if names else []
        for name in MOST_USED if group == "used most" else names:
            lines += _described(FLAGS[name])
    return "\n".join([*lines, "", _CONFIG])


def _described(flag: flags.Flag) -> Iterator[str]:
    """The name, the choices if there are some, and the first sentence about the flag."""
    sentence = (flag.help or "").partition(". ")[0].removesuffix(".")
    word = f"  --{flag.name}" + ("" if flag.boolean else "=")
    if isinstance(flag, flags.EnumFlag):
        choices, _, sentence = sentence.partition(": ")
        word += choices.strip("<>")
    if len(word) >= _TEXT_COLUMN:
        yield word
        word = ""
    yield from textwrap.wrap(
        f"{word:{_TEXT_COLUMN}}{sentence}", _WIDTH, subsequent_indent=" " * _TEXT_COLUMN
    )


def _group_of(name: str) -> str:
    if name in MOST_USED:
        return "used most"
    if name not in DEFINED:
        return "this command"
    strategies = SCOPES[name].strategies if name in SCOPES else ()
    if strategies == ("ps",):
        return "parameter servers"
    if "multiworker" in strategies:
        return "cluster"
    return "start" if name in _START else "run"


def describe_fields(config: object) -> str:
    """Returns a line for each field, with its default, and its description below it."""
    lines = ["fields of the config (the defaults are those of trainer/config.py):"]
    for name, default, text in _fields(config, ""):
        shown = "" if default in ("", (), {}) else default
        lines.append(f"  --config.{name}={shown}")
        lines += textwrap.wrap(text, _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 4)
    return "\n".join(lines)


def _fields(group: Any, prefix: str) -> Iterator[tuple[str, object, str]]:  # Any: a dataclass.
    """The name, the default and the description of each field, also of nested groups."""
    texts = {}
    for kind in reversed(type(group).__mro__):
        attributes = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]
        for found in _ENTRY.finditer(textwrap.dedent(attributes)):
            text = " ".join(found["text"].split())
            texts.update(dict.fromkeys(found["names"].split(", "), text))
    for item in dataclasses.fields(group):
        value = getattr(group, item.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", value, texts.get(item.name, "")


def completion_script(shell: str, config: object) -> str:
    """Returns the script for `shell`: bash, zsh or fish."""
    from trainer.config import flatten
    from trainer.config_file import shipped_configs

    words = [word for flag in own_flags() for word in _words_of(flag)]
    words += [f"--config.{field}=" for field in flatten(config)]
    words += [f"--config={name}" for name in shipped_configs()]
    script = (_FISH if shell == "fish" else _SCRIPT) % {
        "program": _PROGRAM,
        "words": " ".join([*words, "--help", "--version"]),
        "files": "|".join(f"--{name}=*" for name in _FILES),
    }
    return (_ZSH if shell == "zsh" else "") + script


def _words_of(flag: flags.Flag) -> list[str]:
    if flag.boolean:
        return [f"--{flag.name}"]
    if isinstance(flag, flags.EnumFlag):
        return [f"--{flag.name}={value}" for value in flag.parser.enum_values]
    return [f"--{flag.name}="]
