"""The card (README.md) of a recalibrated model, and the licence of its base."""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub.repocard import metadata_load

from ropelens.checkpoints.gguf_rope import stated_license
from ropelens.runtime.folder import RECORD, write_whole
from ropelens.runtime.records import read_json_if_exists
from ropelens.train.base_model import Base
from ropelens.train.recalibration_settings import recorded_settings

CARD = "README.md"
NOTICES = ("LICENSE*", "LICENCE*", "NOTICE*", "COPYING*", "USE_POLICY*")
"""Files of a base that state its licence."""

LICENSE_KEYS = ("license", "license_name", "license_link")
"""Keys in the metadata of a card on the Hub."""


def write_card(
    out: Path, base: Base, record: Mapping[str, Any], *, control: Path | None
) -> None:
    """Write the card of a run, and copy the files that state the licence of its base.

    `record` is the run.json of the run. `control` is the folder of the control of its study.
    """
    copied = copy_notices(base, out)
    stated = licence_of(base)
    settings = recorded_settings(record)
    losses = record["losses"]
    steps = settings["steps"]
    metadata = {"library_name": "transformers", "tags": ["ropelens"], **stated}
    lines = ["---"]
    lines += [f"{key}: {json.dumps(value)}" for key, value in metadata.items()]
    lines += [
        "---",
        "",
        f"# {base.name} recalibrated with {settings['variant']}",
        "",
        f"- base: {base.name} ({record['base']['fingerprint']})",
        f"- variant of RoPE: {settings['variant']}",
        f"- tokens: {record['tokens']:,} ({steps:,} steps of {settings['sequences']} "
        f"sequences of {settings['context']:,})",
        f"- peak learning rate: {settings['learning_rate']:g}",
        f"- trained parameters: {settings['train']}, in {settings['precision']}",
        f"- seed of the text order: {settings['seed']}",
        f"- validation: {settings['validation']}, {record['evaluated_sequences']} sequences",
        f"- loss before: {losses['before']:.4f} nats/token",
        f"- loss after: {losses['after']:.4f} nats/token",
        f"- control: {_control_words(settings, control)}",
        f"- licence of the base: {_licence_words(stated, copied)}",
        "",
        "The model was trained by `ropelens train --from`. run.json has all settings, and "
        "losses.csv has the loss of each held-out sequence at each evaluated step.",
        "",
    ]
    write_whole(out / CARD, "\n".join(lines))


def _control_words(settings: Mapping[str, Any], control: Path | None) -> str:
    """The losses of the control of a study, if it is finished."""
    if settings["variant"] == "control":
        return "this run, which keeps the rotation of the base"
    if control is not None:
        losses = read_json_if_exists(control / RECORD).get("losses")
        if losses is not None:
            return (
                f"{losses['before']:.4f} before, {losses['after']:.4f} nats/token after"
            )
        return "of the same study; it was not finished when this card was written"
    return "none; train it with --variant control and the same settings"


def _licence_words(stated: Mapping[str, str], copied: list[str]) -> str:
    """The licence of the base in words."""
    parts = [str(value) for value in stated.values()]
    if copied:
        parts.append(f"see {', '.join(copied)}")
    if not parts:
        return "not stated in its files; it also applies to this model"
    return f"{'; '.join(parts)}. It also applies to this model"


def licence_of(base: Base) -> dict[str, str]:
    """The licence that the card or the GGUF file of a base states, as metadata of a card."""
    path = base.opened.checkpoint.path
    if path.is_file():
        name = stated_license(path)
        return {} if name is None else {"license": name}
    card = path / CARD
    stated: dict[str, Any] = {}
    if card.is_file():
        with suppress(ValueError, OSError):  # the metadata may be wrong
            stated = metadata_load(card) or {}
    return {key: str(stated[key]) for key in LICENSE_KEYS if stated.get(key)}


def copy_notices(base: Base, out: Path) -> list[str]:
    """Copy the files that state the licence of a base to `out`; return their names."""
    path = base.opened.checkpoint.path
    folder = path if path.is_dir() else path.parent
    names = []
    for pattern in NOTICES:
        for file in sorted(folder.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, out / file.name)
                names.append(file.name)
    return names
