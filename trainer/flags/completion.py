"""Shell completion: a script of the flags, their values and the config fields of a config file.

    print(completion_script("bash", config))

`source <(python -m trainer --completion=bash)` completes `python -m trainer` and the command
`tf-distribution-trainer`. zsh runs the same script, by its emulation of bash's completion. Other
command lines of python are completed as before.
"""

from absl import flags

from trainer.config import Config, flatten
from trainer.config_file import shipped_configs
from trainer.flags import own_flags

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


def completion_script(shell: str, config: Config) -> str:
    """Returns the script for `shell`: bash, zsh or fish."""
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
