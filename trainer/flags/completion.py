"""Shell completion: a script of the flags, their values and the config fields of a config file.

    print(completion_script("bash", FLAGS, config))

`source <(python -m trainer --completion=bash)` completes `python -m trainer` and the command
`tf-distribution-trainer`. zsh runs the same script, by its emulation of bash's completion.
"""

from absl import flags

from trainer.config import Config, flatten
from trainer.config_file import shipped_configs

SHELLS = ("bash", "zsh")
_PROGRAM = "tf-distribution-trainer"
# Flags of absl itself, which nobody types.
_MODULES = ("absl.",)
_FILES = ("config", "model_dir", "data_dir", "data_cache_dir")

_SCRIPT = """\
# bash completion for this program. For each shell: source <(python -m trainer --completion=bash)
_tf_distribution_trainer() {
    local current=${COMP_LINE:0:COMP_POINT}
    current=${current##*[[:space:]]}
    if [[ $1 != %(program)s && ${COMP_LINE} != *" -m trainer "* ]]; then
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
complete -o default -o nosort -F _tf_distribution_trainer %(program)s python python3
"""
_ZSH = "autoload -Uz bashcompinit && bashcompinit\n"


def completion_script(shell: str, values: flags.FlagValues, config: Config) -> str:
    """The script for `shell`, one of SHELLS."""
    words = []
    for name in sorted(values):
        module = values.find_module_defining_flag(name, "")
        if not module.startswith(_MODULES) and name == values[name].name:
            words += _words_of(values[name])
    words += [f"--config.{field}=" for field in flatten(config)]
    words += [f"--config={name}" for name in shipped_configs()]
    script = _SCRIPT % {
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
