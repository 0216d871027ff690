"""What must be equal for a run to continue from a checkpoint, and how a difference is explained.

    ours = identity_of({"batch_size": 64}, {"variables": model.variables})
    lines = differences(saved, ours)     # ["batch_size: 32 there, 64 here"]

Variables are compared by their order, shapes and types: Keras numbers layers anew in each process.
Nothing here reads a file or imports TensorFlow.
"""

import difflib
import itertools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_VARIABLES = "variables"
DYNAMIC_SLOTS = "dynamic_table_slots"  # The key of the slots of tables of dynamic ids.


class Identity(NamedTuple):
    """JSON values that must be equal, and the names of variables, which only messages have."""

    values: Mapping[str, Any]  # That of a kind of variables is a list of descriptions.
    names: Mapping[str, Sequence[str]]  # By the kind of the variables.

    def without_slots(self, tables: Collection[str], ours: "Identity") -> "Identity":
        """Returns this identity without the slots of tables that have these paths in `ours`."""
        there, here = self.values[_VARIABLES], ours.values[_VARIABLES]
        # The description of a table ends with the names of its slots, of which ours has none.
        left = [
            h if path in tables and t.startswith(f"{h} ") else t
            for t, h, path in zip(there, here, ours.names[_VARIABLES], strict=False)
        ]
        return self._replace(values={**self.values, _VARIABLES: left + there[len(here) :]})


def identity_of(settings: Mapping[str, object], kinds: Mapping[str, Sequence[Any]]) -> Identity:
    """Returns the identity of a run as JSON holds it.

    `kinds` has lists of keras.Variable, tf.Variable or Rows.
    """
    values = {**settings, **{kind: _descriptions(variables) for kind, variables in kinds.items()}}
    names = {
        kind: [getattr(v, "path", v.name) for v in variables] for kind, variables in kinds.items()
    }
    return Identity(json.loads(json.dumps(values)), names)


def differences(saved: Identity, ours: Identity, ignored: Collection[str] = ()) -> list[str]:
    """Returns a line for each difference outside the keys `ignored`, in the order of the keys."""
    keys = (saved.values.keys() | ours.values.keys()) - set(ignored)
    if saved.values.get(_VARIABLES) != ours.values.get(_VARIABLES):
        # They differ because the model's variables do.
        keys -= {"optimizer's variables", DYNAMIC_SLOTS}
    lines: list[str] = []
    for key in sorted(keys):
        there, here = saved.values.get(key), ours.values.get(key)
        if there == here:
            continue
        if isinstance(there, list) and isinstance(here, list):
            sides = (there, saved.names.get(key, [])), (here, ours.names.get(key, []))
            lines += [f"{key}: {line}" for line in _variable_differences(*sides)]
        else:
            lines.append(f"{key}: {_short(there)} there, {_short(here)} here")
    return lines


def refusal(path: str, lines: Iterable[str]) -> str:
    """Returns the message about a checkpoint at `path` with these `differences`."""
    return (
        "\n  ".join([f"{path} is of another run, which this one cannot continue:", *lines])
        + "\nGive another --model_dir, or the former settings."
    )


def _descriptions(variables: Sequence[Any]) -> list[str]:
    return [
        " ".join([f"{index} {v.dtype}{list(v.shape)}", *getattr(v, "slot_names", ())])
        for index, v in enumerate(variables)
    ]


def _variable_differences(
    there: tuple[Sequence[str], Sequence[str]], here: tuple[Sequence[str], Sequence[str]]
) -> list[str]:
    """Returns a line for each variable that one side lacks, or that has another shape there.

    Each side has descriptions and names.
    """
    shapes, named = [], []
    for descriptions, names in (there, here):
        shapes.append([description.partition(" ")[2] for description in descriptions])
        if len(names) != len(descriptions):  # Of an earlier version.
            names = [f"variable {index}" for index in range(len(descriptions))]
        named.append([" ".join(pair) for pair in zip(names, shapes[-1], strict=True)])
    lines = []
    matcher = difflib.SequenceMatcher(None, shapes[0], shapes[1], autojunk=False)
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        if kind == "equal":
            continue
        for one, other in itertools.zip_longest(named[0][i:i_end], named[1][j:j_end]):
            if one and other:
                lines.append(f"{one} there, {other} here")
            else:
                lines.append(f"{one} only there" if one else f"{other} only here")
    return lines


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else f"{text[:150]} ... ({len(text)} characters)"
