"""A warning if a model is saved inside a block that edits it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from ropelens.model.hook_blocks import hooks_of

NAME = "save_pretrained"


class SaveWithWarning:
    """`save_pretrained` of a model, with a warning while an edit of the model is open.

    A copy of the model has a copy of this object, which saves the copy.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.blocks = 0  # that are open

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooks = hooks_of(self.model)
        if hooks is not None and any(x.rotates for x in hooks.interventions):
            warnings.warn(
                "save_pretrained writes the model without the edits of the open block; "
                "ropelens.export(model, edit, out=FOLDER) writes the edited model",
                stacklevel=2,
            )
        return save_pretrained(self.model, *args, **kwargs)


def save_pretrained(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Save a model without a warning."""
    return type(model).save_pretrained(model, *args, **kwargs)


@contextmanager
def warned_if_saved(model: PreTrainedModel) -> Iterator[None]:
    """Warn in the block if the model is saved. Blocks may be closed in any order."""
    attributes = vars(model)
    save = attributes.setdefault(NAME, SaveWithWarning(model))
    if not isinstance(save, SaveWithWarning):  # a function of the user
        yield
        return
    save.blocks += 1
    try:
        yield
    finally:
        save.blocks -= 1
        if not save.blocks:
            del attributes[NAME]
